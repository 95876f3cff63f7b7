"""One SGLang engine: start, report ready, wait for its turn, time, write JSON, leave.

usage: worker.py NAME SPEC.json OUTDIR     (SPEC: {"kw": Engine kwargs, "batches": [..],
"n1":, "n2":, "reps":, "prompt":, "ttft": [..]})
"""

import contextlib
import json
import os
import random
import sys
import time
import traceback

T0 = time.time()


def main():
    name, spec, out = sys.argv[1], json.load(open(sys.argv[2])), sys.argv[3]
    res = {"name": name, "kw": spec["kw"], "env": spec.get("env", {}), "cells": []}
    rng = random.Random(1234)

    def log(*a):
        print(f"[{time.time() - T0:7.2f}] {name}:", *a, flush=True)

    def touch(s):
        open(f"{out}/{name}.{s}", "w").write(str(time.time()))

    try:
        import sglang

        log("imported", sglang.__version__)
        eng = sglang.Engine(**spec["kw"])
        log("engine up")
        res["startup_s"] = round(time.time() - T0, 1)

        def gen(b, plen, n):
            ids = [[rng.randrange(100, 120000) for _ in range(plen)] for _ in range(b)]
            t = time.perf_counter()
            o = eng.generate(input_ids=ids, sampling_params={"temperature": 0.0, "max_new_tokens": n, "ignore_eos": True})
            dt = time.perf_counter() - t
            if isinstance(o, dict):
                o = [o]
            m = [x["meta_info"] for x in o]
            tok = sum(x["completion_tokens"] for x in m) / b
            cyc = [x.get("spec_verify_ct", 0) for x in m]
            return dict(
                dt=dt,
                tok=tok,
                cyc=sum(cyc) / b,
                cyc_max=max(cyc),
                cyc_min=min(cyc),
                e2e=max(x.get("e2e_latency", 0) for x in m),
                ids=o[0].get("output_ids", [])[:8],
                distinct=len(set(o[0].get("output_ids", []))),
                meta={k: v for k, v in m[0].items() if "spec" in k},
            )

        P, n1, n2 = spec.get("prompt", 512), spec["n1"], spec["n2"]
        gen(1, P, 8)
        for b in spec["batches"]:
            gen(b, P, 24)
        log("warm")
        touch("ready")
        while not os.path.exists(f"{out}/{name}.go"):
            time.sleep(0.02)
        for b in spec["batches"]:
            gen(b, P, 32)
            rows = []
            for r in range(spec.get("reps", 3)):
                a, c = gen(b, P, n1), gen(b, P, n2)
                dt, dtok, dcyc = c["dt"] - a["dt"], c["tok"] - a["tok"], c["cyc"] - a["cyc"]
                rows.append(
                    dict(
                        dt=dt,
                        dtok=dtok,
                        dcyc=dcyc,
                        t1=a["dt"],
                        t2=c["dt"],
                        cyc_min=c["cyc_min"],
                        cyc_max=c["cyc_max"],
                        ms_cycle=1e3 * dt / dcyc if dcyc > 0 else None,
                        ms_tok=1e3 * dt / dtok,
                        tok_s=b * dtok / dt,
                        acc=dtok / dcyc if dcyc > 0 else None,
                    )
                )

            def med(k):
                return (lambda v: sorted(v)[len(v) // 2] if v else None)([x[k] for x in rows if x[k] is not None])

            cell = dict(
                batch=b,
                prompt=P,
                n1=n1,
                n2=n2,
                ms_cycle=med("ms_cycle"),
                ms_tok=med("ms_tok"),
                tok_s=med("tok_s"),
                acc=med("acc"),
                rows=rows,
                ids=c["ids"],
                distinct=c["distinct"],
                meta=c["meta"],
            )
            res["cells"].append(cell)

            def f(v):
                return "-" if v is None else f"{v:.3f}"

            log(
                f"CELL b={b} ms/cycle={f(cell['ms_cycle'])} ms/step(tok)={f(cell['ms_tok'])} "
                f"tok/s={f(cell['tok_s'])} acc={f(cell['acc'])} spread="
                f"{[round(x['ms_cycle'] or x['ms_tok'], 3) for x in rows]} ids={c['ids'][:4]} "
                f"distinct={c['distinct']} cyc={c['cyc_min']}..{c['cyc_max']}"
            )
        for plen in spec.get("ttft", []):
            gen(1, plen, 1)
            v = sorted(gen(1, plen, 1)["dt"] for _ in range(5))
            res["cells"].append(dict(ttft_prompt=plen, ttft_ms=1e3 * v[2], all=[1e3 * x for x in v]))
            log(f"TTFT prompt={plen} median {1e3 * v[2]:.2f} ms  all {[round(1e3 * x, 2) for x in v]}")
        try:
            si = eng.get_server_info()
            keys = (
                "attention_backend",
                "decode_attention_backend",
                "prefill_attention_backend",
                "page_size",
                "chunked_prefill_size",
                "max_running_requests",
                "speculative_algorithm",
                "speculative_num_steps",
                "speculative_eagle_topk",
                "speculative_num_draft_tokens",
                "speculative_draft_attention_backend",
                "disable_overlap_schedule",
                "cuda_graph_config",
                "mem_fraction_static",
                "max_total_num_tokens",
                "sampling_backend",
                "version",
                "dtype",
                "kv_cache_dtype",
            )
            res["server_info"] = {k: str(si.get(k)) for k in keys}
        except Exception as e:
            res["server_info"] = repr(e)
        json.dump(res, open(f"{out}/{name}.json", "w"), indent=1, default=str)
        if spec.get("profile"):  # GPU-busy time of a cycle (kernel durations), batch 1 and the rest
            import glob

            sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
            from trace_busy import busy

            for b in spec["profile"]:
                try:
                    d = f"{out}/prof_{name}_{b}"
                    eng.start_profile(output_dir=d, activities=["GPU"], with_stack=False, record_shapes=False)
                    r = gen(b, P, spec.get("profile_n", 64))
                    eng.stop_profile()
                    f = sorted(glob.glob(d + "/*.trace.json.gz"))[-1]
                    v = busy(f, r["cyc"] or r["tok"])
                    res.setdefault("profile", {})[b] = v
                    log(
                        f"PROF b={b} wall {v.get('wall_ms')} busy {v.get('gpu_busy_ms')} "
                        f"kernels/cycle {v.get('kernels_per_cycle')} marker {v.get('marker')} {v.get('error', '')}"
                    )
                except Exception as e:
                    log("PROF failed", repr(e)[:300])
            json.dump(res, open(f"{out}/{name}.json", "w"), indent=1, default=str)
        touch("done")
        log("done")
    except BaseException as e:
        traceback.print_exc()
        res["error"] = repr(e)[:2000]
        json.dump(res, open(f"{out}/{name}.json", "w"), indent=1, default=str)
        touch("fail")
    sys.stdout.flush()
    os.environ["PEER_EXIT"] = "1"
    with contextlib.suppress(BaseException):
        eng.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
