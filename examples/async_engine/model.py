"""A small transformer over bytes and pictures, of which each worker has a part.

Tensor parallelism as in large engines: the heads of attention and the hidden features of the MLPs are divided among the
workers. Each computes its part of a sum, and an all-reduce makes the sum known to all, twice a layer. What lies between,
embeddings and output, is in every worker. The weights are random, from a fixed seed. All is in float64, so that the order
of summation, which depends on the number of workers and on what else is in a batch, does not decide which token is the
most likely one.
"""

import os
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed
from torch.nn import functional

LAYERS, WIDTH, HEADS, HIDDEN = 2, 128, 4, 512
HEAD_WIDTH = WIDTH // HEADS
PATCH = 32  # pixels: height and width of the squares of a picture that become an embedding each
END = 256  # the token behind those of the 256 bytes
TOKENS = END + 1


@dataclass
class Layer:
    """The weights of one layer, as far as they are this worker's."""

    attend_in: Tensor  # (WIDTH, 3 * heads here * HEAD_WIDTH): queries, keys and values
    attend_out: Tensor  # (heads here * HEAD_WIDTH, WIDTH)
    up: Tensor  # (WIDTH, hidden features here)
    down: Tensor  # (hidden features here, WIDTH)


@dataclass
class Sequence:
    """What is kept of a request between steps: keys and values of all its positions, for the heads here."""

    length: int = 0
    keys: list[Tensor] = field(default_factory=lambda: [torch.empty(0)] * LAYERS)  # (heads here, length, HEAD_WIDTH) each
    values: list[Tensor] = field(default_factory=lambda: [torch.empty(0)] * LAYERS)


class Shard:
    """The part of the model that is one worker's; its methods are what the engine calls.

    Args:
        rank: Which worker.
        size: Of how many.
        store: A file that does not exist yet, by which the workers find each other.
    """

    def __init__(self, rank: int, size: int, store: str) -> None:
        torch.set_num_threads(1)  # the workers share the cores
        if HEADS % size:
            raise ValueError(f"{HEADS} heads cannot be divided among {size} workers")
        self._size = size
        if size > 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all workers are on this host
            distributed.init_process_group("gloo", store=distributed.FileStore(store, size), rank=rank, world_size=size)
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[0] ** 0.5

        def part(whole: Tensor, dim: int) -> Tensor:
            return whole.chunk(size, dim)[rank].contiguous()

        # Every worker draws all weights, so that they are the same in all, and keeps its part.
        self._embedding = weight(TOKENS, WIDTH) * TOKENS**0.5
        self._patches = weight(3 * PATCH * PATCH, WIDTH)
        self._layers = [
            Layer(
                attend_in=part(weight(WIDTH, 3, HEADS, HEAD_WIDTH), 2).reshape(WIDTH, -1),
                attend_out=part(weight(HEADS * HEAD_WIDTH, WIDTH), 0),
                up=part(weight(WIDTH, HIDDEN), 1),
                down=part(weight(HIDDEN, WIDTH), 0),
            )
            for _ in range(LAYERS)
        ]
        self._output = weight(WIDTH, TOKENS)
        self._pictures: dict[int, Tensor] = {}  # of requests that have not begun
        self._sequences: dict[int, Sequence] = {}

    @torch.inference_mode()
    def look(self, number: int, image: Tensor) -> None:
        """Keep the embeddings of a picture for the request of that number.

        Args:
            number: Of the request.
            image: float32 of shape (3, height, width), both multiples of PATCH. It is not kept.
        """
        squares = image.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)  # (3, rows, columns, PATCH, PATCH)
        flat = squares.permute(1, 2, 0, 3, 4).reshape(-1, 3 * PATCH * PATCH)
        self._pictures[number] = flat.double() @ self._patches

    @torch.inference_mode()
    def step(self, ended: list[int], prompts: list[tuple[int, list[int]]], running: list[tuple[int, int]]) -> list[int]:
        """The next token of all requests.

        Args:
            ended: Numbers of requests to forget.
            prompts: Requests that begin, with their prompts' tokens.
            running: Requests that go on, with their latest token.

        Returns:
            A token for each that begins, then for each that goes on.
        """
        for number in ended:
            self._pictures.pop(number, None)
            self._sequences.pop(number, None)
        batch = []
        for number, prompt in prompts:
            new = self._embedding[torch.tensor(prompt, dtype=torch.int64)]
            if number in self._pictures:
                new = torch.cat([self._pictures.pop(number), new])
            batch.append((self._sequences.setdefault(number, Sequence()), new))
        batch += [(self._sequences[number], self._embedding[token].unsqueeze(0)) for number, token in running]
        return self._forward(batch).argmax(-1).tolist() if batch else []

    def _forward(self, batch: list[tuple[Sequence, Tensor]]) -> Tensor:
        """Run new positions, embeddings of shape (positions, WIDTH), through the model: scores of what comes next."""
        lengths = [len(new) for _, new in batch]
        # All positions of all requests in one matrix; only attention looks at requests one by one.
        x = torch.cat([new + position(sequence.length, len(new)) for sequence, new in batch])
        for index, layer in enumerate(self._layers):
            parts = (norm(x) @ layer.attend_in).split(lengths)
            attended = [attend(sequence, index, part) for (sequence, _), part in zip(batch, parts, strict=True)]
            x = x + self._sum(torch.cat(attended) @ layer.attend_out)
            x = x + self._sum(functional.gelu(norm(x) @ layer.up) @ layer.down)
        for (sequence, _), length in zip(batch, lengths, strict=True):
            sequence.length += length
        last = torch.tensor(lengths).cumsum(0) - 1
        return norm(x[last]) @ self._output

    def _sum(self, part: Tensor) -> Tensor:
        """The sum of all workers' parts."""
        if self._size > 1:
            distributed.all_reduce(part)
        return part


def attend(sequence: Sequence, layer: int, projected: Tensor) -> Tensor:
    """Attention of a request's new positions to all so far. The cache is empty, or there is only one new position."""
    query, key, value = projected.view(len(projected), 3, -1, HEAD_WIDTH).permute(1, 2, 0, 3)  # (heads, positions, width)
    if sequence.length:
        key = torch.cat([sequence.keys[layer], key], 1)
        value = torch.cat([sequence.values[layer], value], 1)
    sequence.keys[layer], sequence.values[layer] = key, value
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=not sequence.length)
    return mixed.transpose(0, 1).reshape(len(projected), -1)


def norm(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def position(start: int, count: int) -> Tensor:
    """Sines and cosines that tell positions apart: (count, WIDTH)."""
    frequencies = 10_000.0 ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    angles = torch.arange(start, start + count, dtype=torch.float64).unsqueeze(1) * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1)
