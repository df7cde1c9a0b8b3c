"""Exceptions of the library can be sent to other processes."""

from __future__ import annotations

import pickle

import pytest

from aioarena import exceptions

WITH_ATTRIBUTES = [
    exceptions.ReaderLostError("lost", pid=7, rank=1, signal=9),
    exceptions.SenderLostError("lost", pid=7, received=3),
    exceptions.WorkerLostError("lost", pid=7, rank=1, exit_code=3),
    exceptions.HandleError("other", expected=1, found=2),
    exceptions.NoSpaceError("full", needed=2, available=1),
    exceptions.NotAllowedError("no", what="os.system"),
]
PLAIN = [
    getattr(exceptions, name)("text")
    for name in exceptions.__all__
    if name not in {"PeerLostError", *(type(error).__name__ for error in WITH_ATTRIBUTES)}
]


@pytest.mark.parametrize("error", [*WITH_ATTRIBUTES, *PLAIN], ids=lambda error: type(error).__name__)
def test_exceptions_pickle(error: exceptions.ArenaError) -> None:
    """With all they know, notes included."""
    error.add_note("a note")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), copy.args, vars(copy)) == (str(error), error.args, vars(error))
