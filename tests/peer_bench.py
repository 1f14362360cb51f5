#!/usr/bin/env python3
"""Speed of llama.cpp (through llama-cpp-python) on the work of `forebay-bench decode`: prefill, then single-token steps.

    python3 -m pip install llama-cpp-python==0.3.36
    python3 tests/peer_bench.py --model MODEL.gguf --text FILE --context 256,7600 [--threads 2] [--steps 32] [--flash-attention]

Prints one JSON object per context: prefill and decode tokens per second (decode: the median of the steps).
"""
import argparse
import json
import statistics
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True, help="text whose tokens fill the context (repeated when short)")
    parser.add_argument("--context", default="256", help="comma-separated token counts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--flash-attention", action="store_true")
    args = parser.parse_args()
    import llama_cpp

    with open(args.text, encoding="utf-8") as file:
        text = file.read().encode("utf-8")
    for context in (int(c) for c in args.context.split(",")):
        llama = llama_cpp.Llama(
            model_path=args.model,
            n_ctx=context + args.steps + 8,
            n_batch=512,
            n_threads=args.threads,
            n_threads_batch=args.threads,
            flash_attn=args.flash_attention,
            verbose=False,
        )
        tokens = llama.tokenize(text, add_bos=False)
        while len(tokens) < context:
            tokens = tokens + tokens
        tokens = tokens[:context]
        start = time.perf_counter()
        llama.eval(tokens)
        prefill = time.perf_counter() - start
        times = []
        token = tokens[-1]
        for _ in range(args.steps):
            start = time.perf_counter()
            llama.eval([token])
            times.append(time.perf_counter() - start)
            token = llama.sample(temp=0.0)
        print(
            json.dumps(
                {
                    "context": context,
                    "threads": args.threads,
                    "flash_attention": args.flash_attention,
                    "prefill_tokens_per_second": round(context / prefill, 2),
                    "decode_tokens_per_second": round(1 / statistics.median(times), 2),
                }
            ),
            flush=True,
        )
        llama.close()


if __name__ == "__main__":
    main()
