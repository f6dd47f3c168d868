"""Continuous batching with a `PagedKVCache`. Each step runs the model once."""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

import flashtune
from examples.serving.model import Transformer, integers
from flashtune.core.errors import CacheFullError

PAGE_SIZE = 16
# Tokens of one step: a prompt that is longer is read in chunks.
STEP_TOKENS = 64
# Requests that are served at once, and the tokens that any of them may come to.
PLACES = 4
LONGEST = 128


@dataclass
class Request:
    """A prompt, the number of tokens to generate, and the tokens so far."""

    prompt: list[int]
    wanted: int
    answer: list[int] = field(default_factory=list)
    sequence: int = -1
    stored: int = 0

    @property
    def tokens(self) -> list[int]:
        """Returns the prompt and the generated tokens."""
        return self.prompt + self.answer

    @property
    def is_done(self) -> bool:
        """Returns whether all tokens are generated."""
        return len(self.answer) == self.wanted


class Server:
    """Serves requests with one model and one cache, in steps."""

    def __init__(self, model: Transformer, cache: flashtune.PagedKVCache) -> None:
        """Nothing is served yet."""
        self.model, self.cache, self.device = model, cache, cache.device
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.replayed = self.preempted = 0
        self._decoder = Decoder(model, cache) if cache.device.type == "cuda" else None

    def step(self) -> None:
        """Runs the model on the next tokens of all active requests."""
        self._admit()
        while not (chunks := self._chunks()):
            self._make_way()
        if self._decoder and all(len(chunk) == 1 for _, chunk in chunks):
            logits = self._decoder(chunks)
            self.replayed += 1
        else:
            logits = self._mixed(chunks)
        for (request, chunk), best in zip(chunks, logits.argmax(-1).tolist(), strict=True):
            request.stored += len(chunk)
            if request.stored == len(request.tokens):
                request.answer.append(best)
            if request.is_done:
                self.cache.free(request.sequence)
                self.running.remove(request)

    def _admit(self) -> None:
        """Activates requests while pages are free. Pages of an equal prompt are shared."""
        while self.waiting and len(self.running) < PLACES:
            request = self.waiting.popleft()
            twin = next(
                (other for other in self.running if other.prompt == request.prompt and other.stored), None
            )
            if twin is None:
                request.sequence = self.cache.add()
            else:
                request.sequence = self.cache.fork(twin.sequence)
                # The last token of the prompt is run again: its logits are not kept.
                request.stored = min(twin.stored, len(request.prompt) - 1)
                self.cache.truncate(request.sequence, request.stored)
            self.running.append(request)

    def _chunks(self) -> list[tuple[Request, list[int]]]:
        """Returns the next tokens of each request, none for a request without a free page."""
        left, chunks = STEP_TOKENS, []
        for request in self.running:
            chunk = request.tokens[request.stored :][: max(left, 0)]
            if chunk:
                try:
                    self.cache.extend(request.sequence, len(chunk))
                except CacheFullError:
                    continue  # others go on, end, and leave pages behind
                chunks.append((request, chunk))
                left -= len(chunk)
        return chunks

    def _make_way(self) -> None:
        """Frees the pages of the youngest request, which starts again later."""
        youngest = self.running.pop()
        if not self.running:
            raise CacheFullError("a request does not fit into the cache by itself: give it more pages")
        self.cache.free(youngest.sequence)
        youngest.stored = 0
        self.waiting.appendleft(youngest)
        self.preempted += 1

    def _mixed(self, chunks: list[tuple[Request, list[int]]]) -> Tensor:
        """Returns the logits after the last token of each chunk, all chunks in one pass."""
        sequences = [request.sequence for request, _ in chunks]
        counts = [len(chunk) for _, chunk in chunks]
        slots = self.cache.slots(sequences, counts)
        table, lengths = self.cache.block_table(sequences), self.cache.lengths(sequences)
        ends = torch.tensor([0, *counts]).cumsum(0)
        starts = ends.to(self.device, torch.int32)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.append(k, v, slots, layer=layer)
            return flashtune.attention_paged(
                q,
                *self.cache.layer(layer),
                table,
                lengths,
                cu_seqlens_q=starts,
                max_seqlen_q=max(counts),
                layout="hnd",
            )

        tokens = integers((token for _, chunk in chunks for token in chunk), self.device)
        places = integers(
            (request.stored + index for request, chunk in chunks for index in range(len(chunk))), self.device
        )
        logits = self.model(tokens, places, attend)
        return logits[(ends[1:] - 1).to(self.device)]


class Decoder:
    """Decodes one token of up to `PLACES` requests at once, as a replayed CUDA graph."""

    def __init__(self, model: Transformer, cache: flashtune.PagedKVCache) -> None:
        """Plans and captures; lengths and block tables change in place from then on."""
        self._cache, device = cache, cache.device
        self._tokens = torch.zeros(PLACES, dtype=torch.int64, device=device)
        self._places = torch.zeros(PLACES, dtype=torch.int64, device=device)
        self._slots = torch.full((PLACES,), -1, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(PLACES, dtype=torch.int32, device=device)
        self._table = torch.zeros(PLACES, -(-LONGEST // PAGE_SIZE), dtype=torch.int32, device=device)
        shape = model.shape
        q = model.embedding.new_zeros(PLACES, shape.heads, shape.head_dim)
        pages = cache.layer(0)
        attention = flashtune.plan_paged(q, *pages, self._table, self._lengths, layout="hnd")

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.append(k, v, self._slots, layer=layer)
            return attention(q, *cache.layer(layer), self._table, self._lengths)

        model(self._tokens, self._places, attend)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = model(self._tokens, self._places, attend)

    def __call__(self, chunks: list[tuple[Request, list[int]]]) -> Tensor:
        """Returns the logits of one token of each request."""
        sequences = [request.sequence for request, _ in chunks]
        self._tokens[: len(chunks)] = torch.tensor([chunk[0] for _, chunk in chunks])
        self._places[: len(chunks)] = torch.tensor([request.stored for request, _ in chunks])
        self._cache.slots(sequences, 1, out=self._slots)
        self._cache.block_table(sequences, out=self._table)
        self._cache.lengths(sequences, out=self._lengths)
        self._graph.replay()
        return self._logits[: len(chunks)]
