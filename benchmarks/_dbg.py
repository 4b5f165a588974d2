import sys, logging
sys.path.insert(0,"tests"); logging.basicConfig()
import torch
from tiny.models import *
from kvconvert.methods import KVScheme
from kvconvert.runtime.hf.generation import adopt
for dt in (torch.float32, torch.bfloat16):
  for scheme in ("oscar","oscar-g128","kivi","kitty","calibquant-2bit","minikv"):
    model=tiny_model("llama","kvconvert",num_hidden_layers=2,head_dim=64).to("cuda",dt).requires_grad_(False)
    adopt(model,[KVScheme.preset(scheme).with_online_rotation()]*2,{})
    ids=random_ids(3,200).cuda(); feed=random_ids(3,150,seed=9).cuda()
    a,b=model.new_kv_cache(),model.new_kv_cache(); a.captures=False
    errs=[]
    with torch.no_grad():
        model(ids,past_key_values=a); model(ids,past_key_values=b)
        for i in range(150):
            x=model(feed[:,i:i+1],past_key_values=a).logits.float(); y=model(feed[:,i:i+1],past_key_values=b).logits.float()
            errs.append(((x-y).norm()/x.norm()).item())
    e=torch.tensor(errs); print(dt,scheme,"max",e.max().item(),"first nonzero",next((i for i,v in enumerate(errs) if v>0),None),"first>1e-3",next((i for i,v in enumerate(errs) if v>1e-3),None), model.captured.recorded,model.captured.replayed,model.captured.reason, [s.flushes for s in a.stores()],[s.flushes for s in b.stores()],flush=True)
