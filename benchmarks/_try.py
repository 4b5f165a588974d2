import sys, time, logging
sys.path.insert(0, "benchmarks"); logging.basicConfig()
import torch, cProfile, pstats
from engine_models import *
cfg=llama_8b()
model=packed_model(cfg,[KVScheme.preset("oscar-g128").with_online_rotation()]*32,"cuda")
B=32
ids=torch.randint(5,30000,(B,1024),device="cuda")
with torch.no_grad():
    cache=model.new_kv_cache()
    tok=model(ids,past_key_values=cache).logits[:,-1:].argmax(-1)
    for _ in range(140): tok=model(tok,past_key_values=cache).logits[:,-1:].argmax(-1)
    torch.cuda.synchronize(); t=time.time()
    for _ in range(128): tok=model(tok,past_key_values=cache).logits[:,-1:].argmax(-1)
    torch.cuda.synchronize(); print("own loop ms/token",(time.time()-t)/128e-3,flush=True)
    pr=cProfile.Profile(); pr.enable()
    for _ in range(128): tok=model(tok,past_key_values=cache).logits[:,-1:].argmax(-1)
    torch.cuda.synchronize(); pr.disable(); pstats.Stats(pr).sort_stats("cumtime").print_stats(45)
