"""Continuous batching of a small transformer with a paged cache, compared with a loop without a cache.

    python -m examples.serving                      # on a GPU, in bf16; decoding replays a CUDA graph
    TRITON_INTERPRET=1 python -m examples.serving   # without one, in fp32, under Triton's interpreter

Run it from the root of the repository. Requests arrive and end. Each step runs the model once on the next
tokens of all active requests: the next chunk of a prompt, or one token of a request that generates. A
`PagedKVCache` stores the keys and values. Requests with equal prompts share pages. If no page is free, the
youngest request gives up its pages and starts again later. The reference loop has no cache. It computes the
whole sequence for each token, with torch's attention. Weights are random.
"""

import argparse
import os
import sys
import time

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashtune
from examples.serving.model import Shape, Transformer, integers
from examples.serving.server import LONGEST, PAGE_SIZE, Request, Server


def main() -> None:
    """Serves, compares and prints the use of the cache."""
    parser = argparse.ArgumentParser(description="Continuous batching over a paged cache.")
    parser.add_argument("--requests", type=int, help="how many; 24 on a GPU, 6 without")
    parser.add_argument("--pages", type=int, help="pages of the cache, of 16 tokens; 24 on a GPU, 4 without")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET")
    device, dtype = (torch.device("cuda"), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    # 8 bits of mantissa against 24: the logits of this model are numbers of about 20.
    margin = 0.5 if on_gpu else 1e-3
    shape = Shape() if on_gpu else Shape(layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16)
    model = Transformer(shape, dtype, device)
    pages = options.pages or (24 if on_gpu else 4)
    cache = flashtune.PagedKVCache(
        pages, PAGE_SIZE, shape.kv_heads, shape.head_dim, layers=shape.layers, dtype=dtype, device=device
    )
    requests = drawn(options.requests or (24 if on_gpu else 6), shape.vocabulary, long=on_gpu)
    server = Server(model, cache)
    server.waiting.extend(requests)
    steps, fullest, started = 0, 0, time.perf_counter()
    while server.waiting or server.running:
        server.step()
        steps, fullest = steps + 1, max(fullest, cache.pages_used)
    seconds = time.perf_counter() - started
    wrong = sum(differing(model, request, device, margin) for request in requests)
    answered = sum(len(request.answer) for request in requests)
    print(f"{len(requests)} requests, {answered} tokens in {steps} steps, {seconds:.1f} s")
    print(f"{server.replayed} steps were replayed from a CUDA graph; {server.preempted} requests began anew")
    print(f"at most {fullest} of {pages} pages were used; {cache.pages_free} are free now")
    print(f"{wrong} of {answered} tokens differ from those of the plain loop")
    sys.exit(1 if wrong or cache.pages_free != pages else 0)


def drawn(count: int, vocabulary: int, *, long: bool) -> list[Request]:
    """Returns random requests. Every third has the prompt of the previous one."""
    generator = torch.Generator().manual_seed(1)

    def number(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=generator))

    requests: list[Request] = []
    for index in range(count):
        length = number(3, LONGEST // 2) if long else number(3, 14)
        prompt = torch.randint(vocabulary, (length,), generator=generator).tolist()
        if index % 3 == 2:
            prompt = list(requests[-1].prompt)
        requests.append(Request(prompt, number(2, LONGEST // 2) if long else number(2, 12)))
    return requests


def plainly(model: Transformer, tokens: list[int], device: torch.device) -> Tensor:
    """Returns the logits after every token without a cache, by torch's attention: [tokens, vocabulary]."""

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    return model(integers(tokens, device), integers(range(len(tokens)), device), attend)


def differing(model: Transformer, request: Request, device: torch.device, margin: float) -> int:
    """Returns the tokens of an answer that differ from the reference loop's, except ties within `margin`."""
    logits = plainly(model, request.tokens[:-1], device)[len(request.prompt) - 1 :]
    chosen = logits.gather(1, integers(request.answer, device)[:, None])[:, 0]
    return int((chosen < logits.amax(-1) - margin).sum())


if __name__ == "__main__":
    main()
