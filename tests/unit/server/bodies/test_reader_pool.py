"""An exception that a body reader does not expect is an error of the server, not of the body."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tinsmith.server.bodies.questions import HeadQuestion, HeadReading, VocabularyQuestion
from tinsmith.server.bodies.reader_pool import BodyReaderError, ReaderPool


def test_a_reader_survives_what_it_did_not_expect(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        pool = ReaderPool(1)
        try:
            with pytest.raises(BodyReaderError, match="FileNotFoundError"):
                await pool.ask("acme", VocabularyQuestion(directory=str(tmp_path / "missing")), b"")
            process = pool._all[0]._process
            large = b'{"model": "small", "rest": "%s"}' % (b"a" * 40_000)
            assert await pool.ask("acme", HeadQuestion(), large) == HeadReading(model="small")
            assert pool._all[0]._process is process
        finally:
            pool.close()

    asyncio.run(scenario())
    assert "FileNotFoundError" in capfd.readouterr().err
