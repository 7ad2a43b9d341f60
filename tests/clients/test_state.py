"""What a client keeps between rounds: by partition and round, on disk."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as given_settings
from hypothesis import strategies as st

from clients.state import ClientState, LostState

W, B = torch.tensor([1.0, 2.0, 3.0]), torch.tensor(4.0)
LIKE = {"control": {"w": torch.zeros(3), "b": torch.zeros(())}}


def named(scale: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"control": {"w": scale * W, "b": scale * B}}


def test_before_the_first_round_it_is_zero(tmp_path: Path) -> None:
    assert [t.tolist() for t in ClientState(tmp_path, 3).load(0, LIKE)["control"]] == [[0, 0, 0], 0]
    assert not list(tmp_path.iterdir())


def test_a_method_that_keeps_nothing_touches_no_disk(tmp_path: Path) -> None:
    assert ClientState(tmp_path / "nowhere", 3).load(7, {}) == {}


def test_it_belongs_to_the_partition_and_the_round(tmp_path: Path) -> None:
    ClientState(tmp_path, 3).save(1, named(1.0), pinned={0})
    ClientState(tmp_path, 4).save(1, named(5.0), pinned={0})
    ClientState(tmp_path, 3).save(2, named(2.0), pinned={1})
    another_process = ClientState(tmp_path, 3)
    assert [t.tolist() for t in another_process.load(1, LIKE)["control"]] == [[1, 2, 3], 4]
    assert [t.tolist() for t in another_process.load(2, LIKE)["control"]] == [[2, 4, 6], 8]
    assert ClientState(tmp_path, 4).load(1, LIKE)["control"][0].tolist() == [5, 10, 15]


def test_a_late_client_removes_nothing_newer(tmp_path: Path) -> None:
    """Round 1's client ends after round 2's: the server gave it up, and counts on round 2."""
    ClientState(tmp_path, 0).save(2, named(2.0), pinned={0})
    ClientState(tmp_path, 0).save(1, named(1.0), pinned={0})
    assert ClientState(tmp_path, 0).load(2, LIKE)["control"][0].tolist() == [2, 4, 6]


def test_only_the_folded_and_the_newest_round_stay(tmp_path: Path) -> None:
    """Rounds 2 and 3 were not folded: the client starts from round 1 each time, and their files go."""
    state = ClientState(tmp_path, 0)
    for server_round, folded in ((1, 0), (2, 1), (3, 1), (5, 1)):
        state.save(server_round, named(server_round), {folded})
    assert sorted(p.name for p in (tmp_path / "0").iterdir()) == ["round-1.safetensors", "round-5.safetensors"]
    state.save(6, named(6.0), pinned={5})
    assert sorted(p.name for p in (tmp_path / "0").iterdir()) == ["round-5.safetensors", "round-6.safetensors"]


def test_a_repeated_round_replaces_its_file(tmp_path: Path) -> None:
    state = ClientState(tmp_path, 0)
    state.save(2, named(1.0), pinned={1})
    state.save(2, named(9.0), pinned={1})
    assert state.load(2, LIKE)["control"][0].tolist() == [9, 18, 27]


@pytest.mark.parametrize("failing", ["os.fsync", "Path.replace"])
def test_a_crash_while_writing_leaves_the_round_before(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round's file is there in whole or not at all."""
    state = ClientState(tmp_path, 0)
    state.save(1, named(1.0), pinned={0})
    monkeypatch.setattr(f"clients.state.{failing}", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        state.save(2, named(2.0), pinned={1})
    assert [p.name for p in (tmp_path / "0").iterdir()] == ["round-1.safetensors"]
    assert state.load(1, LIKE)["control"][0].tolist() == [1, 2, 3]
    with pytest.raises(LostState, match="round 2"):
        state.load(2, LIKE)


def test_lost_state_is_named(tmp_path: Path) -> None:
    state = ClientState(tmp_path, 7)
    with pytest.raises(LostState, match=r"partition 7 .*kept in round 4, .*7/round-4\.safetensors"):
        state.load(4, LIKE)
    state.save(4, {"control": {"w": torch.zeros(2), "b": B}}, pinned={0})
    with pytest.raises(LostState, match=r"control/w is float32\[2\], not float32\[3\]"):
        state.load(4, LIKE)
    with pytest.raises(LostState, match="tracked/w"):
        state.load(4, {"tracked": LIKE["control"]})


@given(data=st.binary(max_size=300))
@given_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_lost_state(data: bytes, tmp_path: Path) -> None:
    state = ClientState(tmp_path, 0)
    state.save(1, named(1.0), pinned={0})
    path = tmp_path / "0" / "round-1.safetensors"
    whole = path.read_bytes()
    for damaged in (data, whole[: len(data)], whole[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(LostState, match=r"round-1\.safetensors"):
            state.load(1, LIKE)
