"""Start the engines of each wave side by side, then time them one after another
(the others idle), so that start-up cost is shared.  usage: driver.py PLAN OUTDIR [NAME ...]"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
CFG = os.environ.get("PEER_CFG", "peer_configs")
T0 = time.time()


def common(model="target8b", bs=(1, 8), **kw):
    d = dict(
        model_path=f"{CFG}/{model}",
        load_format="dummy",
        skip_tokenizer_init=True,
        disable_radix_cache=True,
        context_length=16384,
        max_total_tokens=45056,
        mem_fraction_static=0.9,
        max_running_requests=32,
        dtype="bfloat16",
        disable_prefill_cuda_graph=True,
        cuda_graph_bs_decode=list(bs),
        log_level="info",
        random_seed=1,
    )
    d.update(kw)
    return d


def spec(algo, draft=None, steps=None, topk=None, tokens=None, **kw):
    d = dict(speculative_algorithm=algo)
    if draft:
        d["speculative_draft_model_path"] = f"{CFG}/{draft}"
    if steps:
        d["speculative_num_steps"] = steps
    if topk:
        d["speculative_eagle_topk"] = topk
    if tokens:
        d["speculative_num_draft_tokens"] = tokens
    d.update(kw)
    return d


def job(batches=(1, 8), n1=32, n2=160, reps=3, ttft=(), env=None, profile=(), profile_n=64, **kw):
    return dict(
        kw=kw,
        batches=list(batches),
        n1=n1,
        n2=n2,
        reps=reps,
        ttft=list(ttft),
        env=env or {},
        profile=list(profile),
        profile_n=profile_n,
    )


B4 = (1, 4, 8, 32)
FA3 = dict(attention_backend="fa3")
TRI = dict(attention_backend="triton")


def plans():
    def S(n):
        return {"SGLANG_SIMULATE_ACC_LEN": str(n)}

    big = dict(
        A=job(B4, 32, 288, 4, (1024, 8192), **common(bs=B4)),
        B=job(B4, 32, 160, 4, **common(bs=B4), **spec("EAGLE3", "eagle3", 3, 1, 4)),
        Bsim3=job(B4, 34, 418, 4, env=S(3), **common(bs=B4), **spec("EAGLE3", "eagle3", 3, 1, 4)),
        C1=job((1, 8), 32, 160, 4, **common(), **FA3, **spec("EAGLE3", "eagle3", 5, 4, 8)),
        C2=job((1, 8), 32, 160, 4, **common(), **FA3, **spec("EAGLE3", "eagle3", 3, 4, 16)),
        C3=job((1, 8), 32, 160, 4, **common(), **FA3, **spec("EAGLE3", "eagle3", 5, 8, 64)),
        C1fi=job((1, 8), 32, 160, 4, **common(), **spec("EAGLE3", "eagle3", 5, 4, 8)),
        C2fi=job((1, 8), 32, 160, 4, **common(), **spec("EAGLE3", "eagle3", 3, 4, 16)),
        C3fi=job((1, 8), 32, 160, 4, **common(), **spec("EAGLE3", "eagle3", 5, 8, 64)),
        D=job((1, 8), 64, 448, 4, env=S(3), **common(), **FA3, **spec("NGRAM", tokens=16)),
        E=job((1, 8), 32, 160, 4, **common(), **FA3, **spec("DFLASH", "dflash")),
        F=job((1,), 32, 160, 4, **common(bs=(1,)), **spec("STANDALONE", "draft1b", 3, 1, 4)),
        G=job((1,), 32, 160, 4, **common(bs=(1,)), **FA3, **spec("EAGLE", "eagle2", 5, 4, 8)),
        Ap=job(B4, 32, 288, 4, (1024, 8192), profile=(1, 8), **common(bs=B4)),
        Bp=job((1, 8), 32, 160, 5, profile=(1, 8), **common(), **spec("EAGLE3", "eagle3", 3, 1, 4)),
        C1p=job((1, 8), 32, 160, 5, profile=(1, 8), **common(), **FA3, **spec("EAGLE3", "eagle3", 5, 4, 8)),
        C2p=job((1, 8), 32, 160, 5, profile=(1, 8), **common(), **FA3, **spec("EAGLE3", "eagle3", 3, 4, 16)),
        C3p=job((1, 8), 32, 160, 5, profile=(1, 8), **common(), **FA3, **spec("EAGLE3", "eagle3", 5, 8, 64)),
        Dp=job((1, 8), 64, 448, 5, env=S(3), profile=(1, 8), profile_n=180, **common(), **FA3, **spec("NGRAM", tokens=16)),
        Ep=job((1, 8), 32, 160, 5, profile=(1, 8), **common(), **FA3, **spec("DFLASH", "dflash")),
        Fp=job((1,), 32, 160, 5, profile=(1,), **common(bs=(1,)), **spec("STANDALONE", "draft1b", 3, 1, 4)),
        Gp=job((1,), 32, 160, 5, profile=(1,), **common(bs=(1,)), **FA3, **spec("EAGLE", "eagle2", 5, 4, 8)),
        Btr=job((1, 8), 32, 160, 4, **common(), **TRI, **spec("EAGLE3", "eagle3", 3, 1, 4)),
        C1tr=job((1, 8), 32, 160, 4, **common(), **TRI, **spec("EAGLE3", "eagle3", 5, 4, 8)),
        C3tr=job((1, 8), 32, 160, 4, **common(), **TRI, **spec("EAGLE3", "eagle3", 5, 8, 64)),
        Ftr=job((1,), 32, 160, 4, profile=(1,), **common(bs=(1,)), **TRI, **spec("STANDALONE", "draft1b", 3, 1, 4)),
        A_pcg=job(
            (1,),
            32,
            96,
            2,
            (1024, 8192),
            **{**common(bs=(1,)), "disable_prefill_cuda_graph": False, "cuda_graph_bs_prefill": [1024, 8192]},
        ),
    )
    tiny = {}
    for k, v in big.items():
        w = json.loads(json.dumps(v))
        w["kw"]["model_path"] = f"{CFG}/tiny"
        if w["kw"].get("speculative_draft_model_path", "").endswith("dflash"):
            w["kw"]["speculative_draft_model_path"] = f"{CFG}/dflash_tiny"
        w["n2"], w["reps"], w["ttft"] = w["n1"] + 64, 2, w["ttft"][:1]
        w["kw"]["max_total_tokens"] = 24576
        tiny["t" + k] = w
    return {**big, **tiny}


def main():
    waves = [w.split(",") for w in sys.argv[1].split("/")]
    out = sys.argv[2]
    os.makedirs(out, exist_ok=True)
    logs = os.environ.get("PEER_LOGS", out)
    os.makedirs(logs, exist_ok=True)
    ready_s = float(os.environ.get("PEER_READY_S", "240"))
    P = plans()
    tried = set()
    for wi, names in enumerate(waves):
        procs = {}

        def twin(n):
            return "t" + {"Bsim3": "B", "C2": "C1", "C3": "C1", "C2fi": "C1fi", "C3fi": "C1fi"}.get(n, n)

        bad = [n for n in names if twin(n) in tried and not os.path.exists(f"{out}/{twin(n)}.done")]
        names = [n for n in names if n not in bad]
        tried.update(names)
        if bad:
            print("skipped, the small twin failed:", bad, flush=True)
        for i, n in enumerate(names):
            s = P[n]
            s["kw"]["port"] = 30000 + 400 * (wi * 8 + i)
            s["kw"]["nccl_port"] = s["kw"]["port"] + 57
            json.dump(s, open(f"{out}/{n}.spec", "w"))
            for x in ("ready", "go", "done", "fail"):
                if os.path.exists(f"{out}/{n}.{x}"):
                    os.remove(f"{out}/{n}.{x}")
            env = dict(os.environ, **s["env"])
            procs[n] = subprocess.Popen(
                [sys.executable, "-u", f"{HERE}/worker.py", n, f"{out}/{n}.spec", out],
                stdout=open(f"{logs}/{n}.log", "w"),
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

        def st(n):
            return next(
                (x for x in ("fail", "done", "ready") if os.path.exists(f"{out}/{n}.{x}")),
                "dead" if procs[n].poll() is not None else "wait",
            )

        t = time.time()
        while any(st(n) == "wait" for n in names) and time.time() - t < ready_s:
            time.sleep(0.1)
        print(f"[{time.time() - T0:6.1f}] wave {wi}: " + " ".join(f"{n}={st(n)}" for n in names), flush=True)

        def stop(n, sig):
            return os.killpg(procs[n].pid, sig) if procs[n].poll() is None else None

        for n in names:  # the engines that wait their turn are frozen: no spinning schedulers
            stop(n, signal.SIGSTOP)
        for n in names:
            if st(n) != "ready":
                continue
            stop(n, signal.SIGCONT)
            time.sleep(0.5)
            open(f"{out}/{n}.go", "w").write("1")
            t = time.time()
            while st(n) == "ready" and time.time() - t < 100:
                time.sleep(0.05)
            print(f"[{time.time() - T0:6.1f}] {n}: {st(n)}", flush=True)
        for n, p in procs.items():  # only the process groups started above
            with contextlib.suppress(subprocess.TimeoutExpired):
                p.wait(timeout=3)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGKILL)
        for n in names:
            L = open(f"{logs}/{n}.log", errors="replace").read().splitlines()
            for l in L:
                if ": CELL" in l or ": TTFT" in l or ": PROF" in l:
                    print(l)
            if not os.path.exists(f"{out}/{n}.done"):
                print(f"--- {n} tail")
                print("\n".join(x[:300] for x in L[-int(os.environ.get("PEER_TAIL", "25")) :]))
        time.sleep(1)
    print(f"[{time.time() - T0:6.1f}] all", flush=True)


if __name__ == "__main__":
    main()
