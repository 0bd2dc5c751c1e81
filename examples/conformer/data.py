"""Spoken sentences and what is said: ten recordings, or tones that need no download."""

from __future__ import annotations

import io
import re
import tarfile
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.download import download
from torch import Tensor

# On PyPI; its source archive carries recordings of LibriVox (public domain) and of playing cards
# (BSD licence) with their transcripts, to test with.
PACKAGE, VERSION = "pocketsphinx", "5.1.1"
FOLDERS = ("cards/cards.transcription", "librivox/transcription")
RATE = 16000  # samples of a second
STEP, WINDOW, BANDS = 160, 400, 40  # samples between two frames, and of one; mel bands
ALPHABET = "_ abcdefghijklmnopqrstuvwxyz"  # the first one is CTC's blank


@dataclass(frozen=True)
class Speech:
    features: Tensor  # [count, t, f], logarithms of energies, zeros behind the end
    frames: Tensor  # [count], how many there are of each
    letters: Tensor  # [count, u], numbers of ALPHABET, zeros behind the end
    lengths: Tensor  # [count]

    @classmethod
    def load(cls, name: str, cache: Path) -> Speech:
        """name: `recorded` (downloaded once into `cache`) or `tones`."""
        pairs = _recorded(cache) if name == "recorded" else _tones()
        features = [_energies(samples) for samples, _ in pairs]
        letters = [torch.tensor([ALPHABET.index(c) for c in text]) for _, text in pairs]
        lengths = [torch.tensor([len(x) for x in each]) for each in (features, letters)]
        padded = [torch.nn.utils.rnn.pad_sequence(x, True) for x in (features, letters)]
        return cls(padded[0], lengths[0], padded[1], lengths[1])

    def batch(self, step: int, seed: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Features [b, t, f] with a little noise, frames [b], letters [b, u], lengths [b]: a
        function of seed and step, so the same on every rank.
        """
        random = torch.Generator().manual_seed(seed * 1_000_003 + step)
        order = torch.randperm(len(self.frames), generator=random)
        chosen = order.repeat(-(-size // len(order)))[:size]  # [b]
        features = self.features[chosen]
        noise = 0.1 * torch.randn(features.shape, generator=random)
        return features + noise, self.frames[chosen], self.letters[chosen], self.lengths[chosen]


def spell(best: Tensor) -> str:
    """The text of the best letter of each frame, [t]: of runs the first, without blanks."""
    letters = torch.unique_consecutive(best).tolist()
    return "".join(ALPHABET[i] for i in letters if i)


def text_of(letters: Tensor, length: Tensor) -> str:
    return "".join(ALPHABET[i] for i in letters[: int(length)].tolist())


def _energies(samples: Tensor) -> Tensor:
    """[t, f], of mean 0 and deviation 1."""
    window = torch.hann_window(WINDOW)
    spectrum = torch.stft(samples, WINDOW, STEP, window=window, return_complex=True)  # [bins, t]
    bands = (_mel() @ spectrum.abs().square()).clamp_min(1e-6).log().T  # [t, f]
    return (bands - bands.mean()) / bands.std()


def _mel() -> Tensor:
    """Triangles that overlap, evenly spaced on the mel scale, [f, bins]."""
    top = 2595 * np.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, BANDS + 2) / 2595) - 1)  # [f + 2], Hz
    bins = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    low, mid, high = (edges[i : i + BANDS, None] for i in range(3))
    rows = np.minimum((bins - low) / (mid - low), (high - bins) / (high - mid))
    return torch.from_numpy(rows.clip(0)).float()


def _recorded(cache: Path) -> list[tuple[Tensor, str]]:
    path = cache / "speech.npz"
    if not path.exists():
        archive = download(
            PACKAGE,
            VERSION,
            f"{PACKAGE}-{VERSION}.tar.gz",
            cache,
            "--no-binary",
            PACKAGE,
            instead="--speech tones needs no download",
        )
        with tarfile.open(archive) as tar:
            arrays: Any = dict(pair for name in FOLDERS for pair in _sentences(tar, name))
        partial = cache / "partial.npz"
        np.savez_compressed(partial, **arrays)
        partial.rename(path)
    with np.load(path) as file:
        return [(torch.from_numpy(file[text] / np.float32(2**15)), text) for text in file]


def _sentences(tar: tarfile.TarFile, transcripts: str) -> list[tuple[str, np.ndarray]]:
    """Text and samples of the recordings that a file of transcripts names."""
    folder = f"{PACKAGE}-{VERSION}/test/data/{transcripts.rpartition('/')[0]}"
    listed = _read(tar, f"{folder}/{transcripts.rpartition('/')[2]}").decode()
    found = []
    for text, name in re.findall(r"<s> (.*?) +</s> \((.*)\)", listed):
        with wave.open(io.BytesIO(_read(tar, f"{folder}/{name}.wav"))) as sound:
            assert (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) == (
                RATE,
                1,
                2,
            )
            found.append((text, np.frombuffer(sound.readframes(sound.getnframes()), "<i2")))
    return found


def _read(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    assert file is not None
    return file.read()


def _tones() -> list[tuple[Tensor, str]]:
    """Words in which every letter is a tone of 0.12 s."""
    time = torch.arange(int(0.12 * RATE)) / RATE
    found = []
    for text in ("one two", "three", "four", "five six seven", "eight", "nine ten"):
        tones = [(200 + 120 * ALPHABET.index(c)) * 2 * torch.pi * time for c in text]
        found.append(
            (torch.cat([tone.sin() * torch.hann_window(len(time)) for tone in tones]), text)
        )
    return found
