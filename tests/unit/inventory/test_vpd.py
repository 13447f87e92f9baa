"""VPD: keywords are found, and nonsense is no error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.machines import make_vpd
from railmate.inventory.vpd import keyword


def test_keywords_of_the_read_only_part() -> None:
    vpd = b"\x82\x04\x00ABCD" + make_vpd({"SN": "MT0001", "V3": "c0ffee"})
    assert keyword(vpd, "SN") == "MT0001"
    assert keyword(vpd, "V3") == "c0ffee"
    assert keyword(vpd, "V4") is None


@pytest.mark.parametrize(
    "vpd", [b"", b"\x90", b"\x90\xff\xff", b"\x82\xff\x00short", b"\x78", b"\x90\x04\x00SN\xffA"]
)
def test_data_that_end_too_early(vpd: bytes) -> None:
    assert keyword(vpd, "V3") is None


@given(st.binary(max_size=300))
def test_any_bytes(vpd: bytes) -> None:
    keyword(vpd, "SN")
