"""TTFT of sequential streaming requests on one reused connection, 8 KB prompt (shows Nagle + delayed-ACK stalls).
Needs: mock_worker.py --ports 9841,9842 --decode-us 1000 --tokens-per-chunk 10"""
import random
import bench as Bn, targets as T, uvloop
from loadgen import *
u=["http://127.0.0.1:9841","http://127.0.0.1:9842"]; b=b'{"model":"mock-model","messages":[{"role":"user","content":"hi"}],"max_tokens":5}'
async def go(port):
    c=await connect(port); rng=random.Random(1); t=[]
    for i in range(40):
        body=raw(b"/v1/chat/completions", chat_body([{"role":"user","content":text(rng,8000)}],True,60), port)
        await c.request(body); t.append((c.t_first-c.t0)*1e3)
    return t
print("direct", [round(x,1) for x in uvloop.run(go(9841))[:12]])
for n,p in (("ours",9850),("nginx-rr",9851),("sglang-rr",9852),("vllm-rr",9853),("py-full-Server+rawclient",9854)):
    pr=Bn.spawn(*T.TARGETS[n](p,u),1,"nagle-"+n); Bn.wait_ready(p,b); t=uvloop.run(go(p)); print(n,"TTFT ms p50",round(pct(t,.5),1),"first 12:",[round(x,1) for x in t[:12]]); Bn.stop(pr)
