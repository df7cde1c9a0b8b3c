"""Pictures for the demo: read or made, resized, and cut into patches as a vision-language model wants them.

PPM, PGM and 8-bit PNG are read with zlib and numpy alone; any other format needs Pillow. The patches follow the image
processor of Qwen2-VL: the normalised picture stands twice in time (its temporal patch size is 2), and the patches of a
2 x 2 square follow each other, because the model merges them.
"""

from __future__ import annotations

import importlib
import math
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]  # (height, width, 3), RGB

PATCH = 16
TEMPORAL = 2
MERGE = 2
# Sides of a picture are multiples of this, so that patches and the squares of patches come out even.
GRAIN = PATCH * MERGE

# What CLIP's training data had, per channel, in 0..1; the preprocessing of most vision towers since.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

# A guess: 16k x 16k. Bounds what a broken or hostile header can make us allocate.
_MOST_PIXELS = 1 << 28

_PNG = b"\x89PNG\r\n\x1a\n"
# What the first bytes of a file say it is, for the message that asks for Pillow.
_KNOWN = {
    b"\xff\xd8\xff": "a JPEG",
    b"GIF8": "a GIF",
    b"RIFF": "a WebP",
    b"BM": "a BMP",
    b"II*\0": "a TIFF",
    b"MM\0*": "a TIFF",
}

Tell = Callable[[float], None]  # told how much is done, 0..1; may raise to stop


class PictureError(Exception):
    """A picture cannot be read; the message says why and what helps."""


class _NotHereError(Exception):
    """A valid file of a kind that is left to Pillow."""


# Reading ----------------------------------------------------------------------------------------------------------


def load(path: Path, tell: Tell = lambda done: None) -> Pixels:
    """Read a picture.

    Raises:
        PictureError: It is not there, broken, or needs Pillow.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PictureError(f"cannot read {path}: {error.strerror}") from None
    try:
        if data[:2] in (b"P5", b"P6"):
            return _load_pnm(data)
        if data[:8] == _PNG:
            return _load_png(data, tell)
        kind = next((kind for magic, kind in _KNOWN.items() if data.startswith(magic)), "of no format we know")
    except _NotHereError as other:
        kind = str(other)
    except (ValueError, IndexError, struct.error, zlib.error) as error:
        raise PictureError(f"{path} is broken: {error}") from None
    return _load_with_pillow(path, kind)


def _load_with_pillow(path: Path, kind: str) -> Pixels:
    try:
        image_module: Any = importlib.import_module("PIL.Image")
        ops_module: Any = importlib.import_module("PIL.ImageOps")
    except ImportError:
        raise PictureError(
            f"{path} is {kind}: PPM, PGM and plain 8-bit PNG are read without further packages, for all else "
            "`pip install pillow`"
        ) from None
    try:
        with image_module.open(path) as image:
            return np.array(ops_module.exif_transpose(image).convert("RGB"), np.uint8)
    except Exception as error:  # whatever a decoder raises: it is about this file
        raise PictureError(f"Pillow cannot read {path}: {error}") from None


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise ValueError(f"it claims to have {width} x {height} pixels")
    if width * height > _MOST_PIXELS:
        raise ValueError(f"it claims to have {width} x {height} pixels, more than the {_MOST_PIXELS} we accept")


def _load_pnm(data: bytes) -> Pixels:
    """Binary PPM (P6) and PGM (P5), see ppm(5): magic, width, height, maxval, one white space, then the samples."""
    position = 2
    numbers: list[int] = []
    while len(numbers) < 3:
        while data[position : position + 1].isspace():
            position += 1
        if data[position : position + 1] == b"#":
            position = data.index(b"\n", position)
            continue
        start = position
        while data[position : position + 1].isdigit():
            position += 1
        numbers.append(int(data[start:position].decode("ascii")))
    width, height, maximum = numbers
    _check_size(width, height)
    if not 0 < maximum < 65536:
        raise ValueError(f"its largest value is {maximum}, not 1 to 65535")
    channels = 3 if data[:2] == b"P6" else 1
    samples = np.dtype(np.uint8) if maximum < 256 else np.dtype(">u2")
    count = width * height * channels
    if len(data) - position - 1 < count * samples.itemsize:
        raise ValueError(f"it ends after {len(data)} bytes, in the middle of its pixels")
    raw = np.frombuffer(data, samples, count, position + 1).reshape(height, width, channels)
    if maximum != 255:
        raw = (np.minimum(raw, maximum).astype(np.uint32) * 255 // maximum).astype(np.uint8)
    return _to_rgb(raw.astype(np.uint8, copy=False))


def _load_png(data: bytes, tell: Tell) -> Pixels:
    """8-bit PNG without interlacing. Alpha is dropped, as image processors do with ``convert("RGB")``."""
    chunks: dict[bytes, list[bytes]] = {}
    position, kind = len(_PNG), b""
    while kind != b"IEND":
        (nbytes,) = struct.unpack_from(">I", data, position)
        kind = data[position + 4 : position + 8]
        body = data[position + 8 : position + 8 + nbytes]
        (checksum,) = struct.unpack_from(">I", data, position + 8 + nbytes)
        if zlib.crc32(kind + body) != checksum:
            raise ValueError(f"its {kind.decode('ascii', 'replace')} chunk has a wrong checksum")
        chunks.setdefault(kind, []).append(body)
        position += 12 + nbytes
    if b"IHDR" not in chunks:
        raise ValueError("it has no header")
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", chunks[b"IHDR"][0])
    _check_size(width, height)
    if depth != 8 or interlaced or colour not in (0, 2, 3, 4, 6):
        raise _NotHereError(f"a PNG with {depth} bits a sample{', interlaced' if interlaced else ''}")
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    expected = height * (1 + width * channels)
    rows = zlib.decompressobj().decompress(b"".join(chunks.get(b"IDAT", [])), expected)
    if len(rows) != expected:
        raise ValueError(f"it has {len(rows)} bytes of pixels, not {expected}")
    pixels = _unfilter(np.frombuffer(rows, np.uint8).reshape(height, 1 + width * channels), channels, tell)
    if colour == 3:
        palette = np.frombuffer(chunks[b"PLTE"][0] if b"PLTE" in chunks else b"", np.uint8).reshape(-1, 3)
        if int(pixels.max()) >= len(palette):
            raise ValueError("it uses colours that its palette does not have")
        return palette[pixels[:, :, 0]]
    return _to_rgb(pixels)


def _unfilter(rows: Pixels, channels: int, tell: Tell) -> Pixels:
    """Undo PNG's filters. Each row says which of its neighbours (left, up, upper left) its pixels were predicted from.

    A pixel needs neighbours that were just computed, so neither rows nor columns can be done at once; diagonals can:
    all three neighbours lie on the last two diagonals.
    """
    height, width = rows.shape[0], (rows.shape[1] - 1) // channels
    filters = rows[:, 0]
    if int(filters.max()) > 4:
        raise ValueError(f"it uses filter {filters.max()}, PNG has 0 to 4")
    raw = rows[:, 1:].reshape(height, width, channels)
    pixels = np.empty_like(raw)
    # By how much each row wants each prediction: 0 or 1.
    wants = [(filters == number).astype(np.int16)[:, None] for number in range(5)]
    used = [bool(want.any()) for want in wants]
    # Predictions by row, with a row of zeros above the first; rows that a diagonal has not reached stay zero.
    current, last, before = (np.zeros((height + 1, channels), np.int16) for _ in range(3))
    for diagonal in range(height + width - 1):
        first, end = max(0, diagonal - width + 1), min(diagonal, height - 1) + 1
        row = np.arange(first, end)
        column = diagonal - row
        left, up, corner = last[first + 1 : end + 1], last[first:end], before[first:end]
        value = raw[row, column].astype(np.int16)
        if used[1]:
            value += wants[1][first:end] * left
        if used[2]:
            value += wants[2][first:end] * up
        if used[3]:
            value += wants[3][first:end] * ((left + up) >> 1)
        if used[4]:
            to_left, to_up = np.abs(up - corner), np.abs(left - corner)
            to_corner = np.abs(left + up - 2 * corner)
            nearest = np.where(to_up <= to_corner, up, corner)
            nearest = np.where((to_left <= to_up) & (to_left <= to_corner), left, nearest)
            value += wants[4][first:end] * nearest
        value &= 255
        pixels[row, column] = value
        current[first + 1 : end + 1] = value
        current, last, before = before, current, last
        if diagonal % 256 == 0:
            tell(diagonal / (height + width))
    return pixels


def _to_rgb(pixels: Pixels) -> Pixels:
    """Grey, grey with alpha, RGB or RGBA, to RGB."""
    if pixels.shape[2] < 3:
        pixels = np.broadcast_to(pixels[:, :, :1], (*pixels.shape[:2], 3))
    return np.array(pixels[:, :, :3])  # writable, which torch wants


# Making and resizing ----------------------------------------------------------------------------------------------


def make(size: int, tell: Tell = lambda done: None) -> Pixels:
    """A picture of waves from three sources, one a colour: every patch differs, and it takes no file."""
    pixels = np.empty((size, size, 3), np.uint8)
    across = np.linspace(-1, 1, size, dtype=np.float32)
    sources = ((-0.6, -0.4), (0.5, -0.5), (0.1, 0.7))
    for start in range(0, size, GRAIN):
        down = across[start : start + GRAIN, None]
        for channel, (x, y) in enumerate(sources):
            distance = np.sqrt((across - x) ** 2 + (down - y) ** 2)
            pixels[start : start + GRAIN, :, channel] = 127.5 + 127.5 * np.sin(60 * distance)
        tell(start / size)
    return pixels


def fitting(width: int, height: int, size: int) -> tuple[int, int]:
    """The (width, height) of a picture whose longer side is brought to ``size``, both multiples of ``GRAIN``."""
    scale = size / max(width, height)
    return tuple(max(GRAIN, math.floor(side * scale / GRAIN + 0.5) * GRAIN) for side in (width, height))  # type: ignore[return-value]


def resize(pixels: Pixels, width: int, height: int) -> Pixels:
    if pixels.shape[:2] == (height, width):
        return pixels
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    planes = torch.nn.functional.interpolate(planes, (height, width), mode="bilinear", antialias=True)
    return np.ascontiguousarray(planes[0].permute(1, 2, 0).numpy())


# Patches ----------------------------------------------------------------------------------------------------------


def to_patches(pixels: Pixels, tell: Tell = lambda done: None) -> torch.Tensor:
    """Normalise a picture and cut it up: bf16 of shape (patches, 3 * temporal * patch * patch).

    Args:
        pixels: A picture with sides that are multiples of ``GRAIN``.
        tell: Told of the progress.
    """
    height, width, _ = pixels.shape
    squares_down, squares_across = height // GRAIN, width // GRAIN
    mean, std = torch.tensor(CLIP_MEAN) * 255, torch.tensor(CLIP_STD) * 255
    values = torch.empty((squares_down, squares_across, MERGE, MERGE, 3, TEMPORAL, PATCH, PATCH), dtype=torch.bfloat16)
    for index in range(squares_down):
        strip = torch.from_numpy(pixels[index * GRAIN : (index + 1) * GRAIN]).float().sub_(mean).div_(std)
        patches = strip.view(MERGE, PATCH, squares_across, MERGE, PATCH, 3).permute(2, 0, 3, 5, 1, 4)
        values[index] = patches.unsqueeze(4)
        tell(index / squares_down)
    return values.view(squares_down * squares_across * MERGE * MERGE, 3 * TEMPORAL * PATCH * PATCH)
