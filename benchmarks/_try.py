import sys, time, logging
sys.path.insert(0, "benchmarks"); logging.basicConfig()
import torch
from engine_models import *
torch.manual_seed(0)
t=time.time()
cfg=llama_8b()
model=packed_model(cfg,[KVScheme.preset("oscar-g128").with_online_rotation()]*32,"cuda")
torch.cuda.synchronize(); print("built",time.time()-t, torch.cuda.memory_allocated()/1e9, flush=True)
def gen(ids,n,**kw):
    torch.cuda.synchronize(); t=time.time(); o=model.generate(ids,max_new_tokens=n,do_sample=False,**kw); torch.cuda.synchronize(); return time.time()-t,o
for B,L in ((1,1024),(32,1024)):
    ids=torch.randint(5,30000,(B,L),device="cuda")
    gen(ids,8); r=model.captured.recorded
    a,_=gen(ids,8); b,o=gen(ids,8+128)
    print(B,L,"captured ms/token",(b-a)/128*1e3, "recorded",r,model.captured.recorded,model.captured.replayed,model.captured.reason,flush=True)
    a,_=gen(ids,4,disable_compile=True); b,o2=gen(ids,4+32,disable_compile=True)
    print(B,L,"eager ms/token",(b-a)/32*1e3, "same tokens",(o[:, :L+36]==o2).float().mean().item(),flush=True)
    rec=list(model.captured._recordings.values())[-1]
    e0,e1=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
    e0.record(); [rec.graph.replay() for _ in range(20)]; e1.record(); torch.cuda.synchronize()
    print("graph replay alone ms",e0.elapsed_time(e1)/20,flush=True)
# host profile of one captured step
import cProfile,pstats
cache=model.new_kv_cache(); ids=torch.randint(5,30000,(1,1024),device="cuda")
with torch.no_grad():
    tok=model(ids,past_key_values=cache).logits[:,-1:].argmax(-1)
    for _ in range(3): tok=model(tok,past_key_values=cache).logits[:,-1:].argmax(-1)
    torch.cuda.synchronize(); t=time.time()
    for _ in range(100): tok=model(tok,past_key_values=cache).logits[:,-1:].argmax(-1)
    torch.cuda.synchronize(); print("own loop ms/token",(time.time()-t)*10,flush=True)
    pr=cProfile.Profile(); pr.enable()
    for _ in range(60): tok=model(tok,past_key_values=cache).logits[:,-1:].argmax(-1)
    torch.cuda.synchronize(); pr.disable(); pstats.Stats(pr).sort_stats("tottime").print_stats(18)
pr=cProfile.Profile(); pr.enable(); gen(ids,100); pr.disable(); pstats.Stats(pr).sort_stats("tottime").print_stats(28)
from torch.profiler import profile, ProfilerActivity
with profile(activities=[ProfilerActivity.CUDA]) as p:
    rec.graph.replay(); torch.cuda.synchronize()
print(p.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=60))
