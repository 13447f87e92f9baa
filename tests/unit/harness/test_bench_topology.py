"""hack/bench topology: it measures the machine it says, and tells by its exit code whether that was quick enough."""

from __future__ import annotations

import pytest

from harness import bench, bench_topology


def test_the_machine_has_8_gpus_32_nics_and_512_vfs() -> None:
    machine = bench_topology.big_machine()
    vfs = [f for f in machine.functions.values() if f.physical_function]
    assert (len(machine.gpus), len(vfs)) == (8, 512)
    assert len({f.physical_function for f in vfs}) == 32


def test_every_step_of_the_real_thing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(
        ["topology", "--runs", "1"]
    )  # whether it is quick enough here and now is not this test's matter
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["discovery", "topology", "slices", "sum"]
    assert all(float(line.split()[1]) > 0 for line in lines)


@pytest.mark.parametrize(("milliseconds", "code"), [(100.0, 0), (100.1, 1)])
def test_the_best_run_decides_against_the_limit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, milliseconds: float, code: int
) -> None:
    runs = iter([900.0, milliseconds, 800.0])
    monkeypatch.setattr(bench_topology, "write_tree", lambda _machine, _root: None)
    monkeypatch.setattr(
        bench_topology, "_once", lambda _root: dict.fromkeys(("a", "b"), 50.0) | {"c": next(runs) + 100}
    )
    assert bench.main(["topology", "--runs", "3"]) == code
    assert f"{milliseconds + 200:.1f} ms CPU (limit 300; median of 3 runs" in capsys.readouterr().out
