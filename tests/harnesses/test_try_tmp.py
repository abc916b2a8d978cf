import re, pytest, json
from tests.harnesses.lab import *
from tests.proxy.fake_harness import call
@pytest.mark.parametrize("name,version", [("codex","0.171.0"),("opencode","1.18.33"),("qwen-code","0.15.10")])
async def test_try(lab,name,version):
    def rule(text, n):
        if n<3:
            print(name, n, re.findall(r'"function": \{"name": "([^"]+)"', text))
            if n>=0: open(f"/tmp/prompt-{name}-{n}.txt","w").write(text)
        return [Script("Done.")]
    r = await lab.run(name, version, rule, seconds=90)
    print(r.outcome, r.reason, r.exit, r.seconds, r.detail); print(lab.output()[-2500:])
    for row in lab.world.sink.rows: print(row.turn,row.parent,row.keep,len(row.context),len(row.output),row.role,row.thread,row.evidence[:300], row.status)
    print(lab.world.capture.stats)
