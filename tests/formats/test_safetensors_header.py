"""Headers: every malformed file is refused in one line, every file the format allows is read."""

import math
import os
import pickle
import struct
import time
import zipfile

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from support.refusals import refused, safetensors_bytes, tensor

from qwenimg.common.base.errors import ModelError
from qwenimg.common.formats.safetensors import BITS, MAX_HEADER, read_header

HEADER_SECONDS = 0.3  # 2,000 tensors; takes about 0.01 s on an idle core

A = tensor([2], 0, 8)
EIGHT = bytes(8)


def one(**changes):
    return {"a": {**A, **changes}}


MALFORMED = {
    "empty file": (b"", "is empty"),
    "7 bytes": (b"\x01" * 7, "only 7 bytes"),
    "a text": (b"a red circle\na blue star\n", "is a text, not the weights"),
    "length 2^63": (safetensors_bytes("{}", length=2**63), "claims a header"),
    "length 100,000,001": (safetensors_bytes("{}", length=100_000_001), "claims a header"),
    "length past the end": (safetensors_bytes(one(), EIGHT, length=4096), "cut short"),
    "length of a small pickle": (safetensors_bytes("{}", length=0x280), "cut short"),
    "length 0": (safetensors_bytes(b""), "not JSON"),
    "not UTF-8": (safetensors_bytes(b'{"\xff\xfe":1}'), "not UTF-8"),
    "byte order mark": (safetensors_bytes(b"\xef\xbb\xbf{}"), "byte order mark"),
    "not JSON": (safetensors_bytes("{nonsense"), "not JSON"),
    "list": (safetensors_bytes("[]"), "not a JSON object"),
    "text after the object": (safetensors_bytes("{} x"), "not JSON"),
    "null byte padding": (safetensors_bytes("{}\0\0"), "not JSON"),
    "unknown dtype": (safetensors_bytes(one(dtype="F31"), EIGHT), "unknown dtype 'F31'"),
    "dtype is a list": (safetensors_bytes(one(dtype=["F32"]), EIGHT), "unknown dtype"),
    "overlap": (safetensors_bytes({"a": A, "b": tensor([2], 4, 12)}, bytes(12)), "'b' overlaps"),
    "same bytes twice": (safetensors_bytes({"a": A, "b": A}, EIGHT), "overlaps"),
    "hole": (safetensors_bytes({"a": A, "b": tensor([2], 12, 20)}, bytes(20)), "'b' leaves a hole"),
    "hole at the start": (safetensors_bytes({"a": tensor([2], 4, 12)}, bytes(12)), "hole"),
    "truncated data": (safetensors_bytes(one(), EIGHT[:-1]), "cut short"),
    "trailing bytes": (safetensors_bytes(one(), EIGHT + b"PK"), "2 bytes after"),
    "only trailing bytes": (safetensors_bytes({}, b"x"), "1 bytes after"),
    "shape is not the offsets": (safetensors_bytes(one(shape=[3]), EIGHT), "does not take bytes 0 to 8"),
    "65536^4": (safetensors_bytes(one(shape=[65536] * 4, data_offsets=[0, 0])), "too large"),
    "wrap around 2^64": (safetensors_bytes(one(shape=[2**31 - 1] * 3 + [0], data_offsets=[0, 0])), "too large"),
    "negative dims": (safetensors_bytes(one(shape=[-1, -4], data_offsets=[0, 16]), bytes(16)), "shape"),
    "begin after end": (safetensors_bytes(one(data_offsets=[8, 0]), EIGHT), "does not take"),
    "negative offsets": (safetensors_bytes(one(data_offsets=[-8, 0]), EIGHT), "data_offsets"),
    "offsets near 2^64": (safetensors_bytes(one(data_offsets=[2**64 - 8, 2**64]), EIGHT), "expected"),
    "2^32 + 2": (safetensors_bytes(one(shape=[2**32 + 2]), EIGHT), "shape"),
    "duplicate name, other range": (
        safetensors_bytes(b'{"a":%b,"a":%b}' % ((b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}',) * 2), EIGHT),
        "'a' occurs twice",
    ),
    "duplicate field": (
        safetensors_bytes('{"a":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}', EIGHT),
        "'dtype' occurs twice",
    ),
    "metadata is not a table": (safetensors_bytes({"__metadata__": []}), "__metadata__"),
    "metadata is not strings": (safetensors_bytes({"__metadata__": {"step": 3}}), "__metadata__"),
    "metadata is half a surrogate": (safetensors_bytes('{"__metadata__":{"a":"\\ud800"}}'), "__metadata__"),
    "200,000 brackets": (safetensors_bytes("[" * 200_000), "deep"),
    "5,000,000 brackets": (safetensors_bytes("[" * 5_000_000), "values"),
    "5,000,000 brackets, balanced": (safetensors_bytes("[]" * 2_500_000), "values"),
    "16,000,000 quotes": (safetensors_bytes('"' * 16_000_000), "values"),
    "nested metadata": (safetensors_bytes({"__metadata__": {"a": [[1]]}}), "deep"),
    "100,001 tensors": (
        safetensors_bytes("{" + ",".join(f'"{i}":{{}}' for i in range(100_001)) + "}"),
        "100001 tensors",
    ),
    "[0, 2^62]": (safetensors_bytes(one(shape=[0, 2**62], data_offsets=[0, 0])), "shape"),
    "[0, 2^63]": (safetensors_bytes(one(shape=[0, 2**63], data_offsets=[0, 0])), "shape"),
    "integer of 5,000 digits": (safetensors_bytes('{"a":' + "1" * 5000 + "}"), "5000 digits"),
    "git-lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n",
        "git-lfs",
    ),
    "web page": (b"\n<!DOCTYPE html>\n<html><body>404</body></html>", "web page"),
    "raw pickle": (pickle.dumps({"weight": [1.0] * 99}, protocol=4), "pickle"),
    "PyTorch pickle": (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.", "pickle"),
    "zip": (b"PK\x03\x04" + bytes(60), "zip"),
    "GGUF": (b"GGUF\x03\0\0\0" + bytes(60), "GGUF"),
    "7z": (b"7z\xbc\xaf\x27\x1c" + bytes(60), "7z"),
    "name with escape codes": (safetensors_bytes({"\x1b[2J\n../../x": A}, EIGHT), r"\x1b[2J\n../../x"),
    "name that turns text around": (safetensors_bytes({"a\u202eb": A}, EIGHT), "u202e"),
    "name of 513": (safetensors_bytes({"n" * 513: A}, EIGHT), "512"),
    "name of 4,000,000": (safetensors_bytes({"n" * 4_000_000: A}, EIGHT), "512"),
    "empty name": (safetensors_bytes({"": A}, EIGHT), "512"),
    "float dim": (safetensors_bytes(one(shape=[2.0]), EIGHT), "shape"),
    "exponent dim": (safetensors_bytes('{"a":{"dtype":"F32","shape":[2e0],"data_offsets":[0,8]}}', EIGHT), "shape"),
    "minus zero": (safetensors_bytes('{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'), "-0"),
    "NaN dim": (safetensors_bytes('{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', EIGHT), "NaN"),
    "bool dim": (safetensors_bytes(one(shape=[True, 2]), EIGHT), "shape"),
    "string shape": (safetensors_bytes(one(shape="2"), EIGHT), "shape"),
    "three offsets": (safetensors_bytes(one(data_offsets=[0, 4, 8]), EIGHT), "data_offsets"),
    "missing offsets": (safetensors_bytes({"a": {"dtype": "F32", "shape": [2]}}, EIGHT), "not exactly"),
    "extra field": (safetensors_bytes(one(layout="strided"), EIGHT), "not exactly"),
    "entry is a list": (safetensors_bytes({"a": [1]}), "not exactly"),
    "rank 1,000,000": (
        safetensors_bytes('{"a":{"dtype":"F32","shape":[' + "1," * 999_999 + '1],"data_offsets":[0,4]}}', bytes(4)),
        "shape",
    ),
    "rank 100": (safetensors_bytes(one(shape=[1] * 100, data_offsets=[0, 4]), bytes(4)), "shape"),
    "half bytes": (safetensors_bytes({"a": tensor([3], 0, 1, "F4")}, b"x"), "does not take"),
}


@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.sample(23)
def test_malformed_is_refused(tmp_path, case):
    raw, reason = MALFORMED[case]
    path = tmp_path / "weights.safetensors"
    path.write_bytes(raw)
    text = refused(read_header, path)
    assert "weights.safetensors" in text and reason in text


def test_largest_headers_are_refused_in_time(tmp_path):
    path = tmp_path / "weights.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 90_000_000) + b"{")
        file.truncate(90_000_100)
    refused(read_header, path)
    integers = '{"a":{"shape":[' + "0," * ((MAX_HEADER >> 1) - 20) + "0]}}"
    path.write_bytes(safetensors_bytes(integers))
    assert "values" in refused(read_header, path)


def test_two_gigabytes_and_one_byte_short(tmp_path):
    raw = safetensors_bytes({"a": tensor([2**31 - 1], 0, 2**31 - 1, "U8")})
    path = tmp_path / "weights.safetensors"
    for missing in (0, 1):
        with path.open("wb") as file:
            file.write(raw)
            file.truncate(len(raw) + 2**31 - 1 - missing)
        if missing:
            assert "cut short" in refused(read_header, path)
        else:
            read_header(path).file.close()


# File kinds


def test_files_that_are_not_regular(tmp_path):
    fifo, loop, dangling = tmp_path / "fifo", tmp_path / "loop", tmp_path / "dangling"
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    dangling.symlink_to(tmp_path / "nowhere")
    device = tmp_path / "zero"
    device.symlink_to("/dev/zero")
    assert "pipe" in refused(read_header, fifo)
    assert "device" in refused(read_header, device)
    assert "folder" in refused(read_header, tmp_path)
    assert "link to a file that does not exist" in refused(read_header, dangling)
    assert "does not exist" in refused(read_header, tmp_path / "missing.safetensors")
    refused(read_header, loop)
    refused(read_header, tmp_path / "nu\0ll")
    refused(read_header, tmp_path / ("n" * 300))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_no_permission(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(safetensors_bytes(one(), EIGHT))
    path.chmod(0)
    assert "ermission" in refused(read_header, path)


def test_refusal_leaves_no_descriptor_open(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(MALFORMED["hole"][0])
    before = os.dup(0)
    os.close(before)
    for _ in range(3):
        refused(read_header, path)
    after = os.dup(0)
    os.close(after)
    assert after == before


def test_zip_bomb_runs_nothing(tmp_path):
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {canary}",)

    path = tmp_path / "weights.safetensors"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Evil()))
        archive.writestr("archive/data/0", bytes(1 << 24))
    assert "zip" in refused(read_header, path)
    assert not canary.exists()


# Valid files


def arrays():
    rng = np.random.default_rng(3)
    return {
        "b.weight": rng.standard_normal((3, 5)).astype(np.float32),
        "a.bias": rng.standard_normal(7).astype(np.float16),
        "scalar": np.array(1.5, np.float32),
        "empty": np.zeros((0,), np.float32),
        "flat": np.zeros((4, 0, 3), np.int64),
        "flags": np.array([True, False, True]),
        "wide": np.arange(6, dtype=np.uint8).reshape(1, 1, 2, 1, 3, 1, 1, 1),
    }


@pytest.mark.parametrize("metadata", [None, {"format": "pt", "note": 'naïve \\ " 图 😀'}])
def test_files_of_the_package_are_read(tmp_path, metadata):
    path = tmp_path / "weights.safetensors"
    safetensors.numpy.save_file(arrays(), path, metadata=metadata)
    header = read_header(path)
    raw = path.read_bytes()
    assert header.metadata == (metadata or {})
    assert header.tensors.keys() == arrays().keys()
    for name, array in arrays().items():
        stored = header.tensors[name]
        assert stored.shape == array.shape
        assert raw[stored.begin : stored.end] == array.tobytes()
    header.file.close()


@pytest.mark.parametrize("pad", ["{} ", "  {}", "{}\n\t\r "])
def test_blanks_around_the_header_are_allowed(tmp_path, pad):
    path = tmp_path / "weights.safetensors"
    table = '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    raw = safetensors_bytes(pad.replace("{}", table), EIGHT)
    safetensors.deserialize(raw)
    path.write_bytes(raw)
    header = read_header(path)
    assert header.tensors["a"].shape == (2,)
    header.file.close()


def test_time_for_two_thousand_tensors(tmp_path):
    """The size of a real transformer: 2,000 tensors of 37 GB, of which only the header takes space on disk."""
    each = 3072 * 3072 * 2
    table = {
        f"transformer_blocks.{i}.attn.to_q.weight": tensor([3072, 3072], i * each, (i + 1) * each, "BF16")
        for i in range(2000)
    }
    raw = safetensors_bytes(table)
    path = tmp_path / "weights.safetensors"
    with path.open("wb") as file:
        file.write(raw)
        try:
            file.truncate(len(raw) + 2000 * each)
        except OSError:
            pytest.skip("this filesystem has no sparse files")
    start = time.process_time()
    header = read_header(path)
    seconds = time.process_time() - start
    header.file.close()
    print(f"header of 2,000 tensors, {2000 * each / 1e9:.1f} GB: {seconds * 1e3:.1f} ms")
    assert len(header.tensors) == 2000
    assert seconds < HEADER_SECONDS


# Against the package: what it rejects is never accepted

SEED = safetensors_bytes(
    '{"__metadata__":{"k":"v\\u0041"},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},'
    '"b":{"dtype":"BF16","shape":[],"data_offsets":[8,10]},"c":{"dtype":"F4","shape":[0,2],"data_offsets":[10,10]}}',
    bytes(10),
)
POSITIONS = st.integers(0, len(SEED) - 1)
MUTATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), POSITIONS, st.binary(min_size=1, max_size=2)),
        st.tuples(st.just("insert"), POSITIONS, st.sampled_from([b"0", b"-", b" ", b",", b'"', b"\\", b"\\ud800"])),
        st.tuples(st.just("cut"), POSITIONS, st.binary(min_size=1, max_size=3)),
    ),
    min_size=1,
    max_size=4,
)


def mutate(raw, mutations):
    for kind, at, piece in mutations:
        skip = 0 if kind == "insert" else len(piece)
        raw = raw[:at] + (b"" if kind == "cut" else piece) + raw[at + skip :]
    return raw


DIMS = st.one_of(st.integers(0, 4), st.sampled_from([-1, 2**31 - 1, 2**32, 2**63, 1.0, None]))
TENSORS = st.tuples(
    st.sampled_from([dtype for dtype in BITS for _ in range(1 + (dtype in ("F32", "BF16", "F4", "F6_E2M3")))]),
    st.lists(DIMS, max_size=3),
    st.sampled_from([0] * 9 + [-1, 1]),  # bytes by which the end is wrong
)


def table_of(tensors):
    """A header of `tensors` (dtype, shape, error), contiguous but for the errors, and the length of its data."""
    table, at = {}, 0
    for i, (dtype, shape, error) in enumerate(tensors):
        whole = all(type(d) is int and d >= 0 for d in shape)
        end = min(at + (math.prod(shape) * BITS[dtype] + 7) // 8 if whole else at, 2**64) + error
        table[f"t{i}"] = tensor(shape, at, end, dtype)
        at = end
    return table, at


def accepted(path, raw):
    path.write_bytes(raw)
    try:
        header = read_header(path)
    except ModelError as error:
        assert str(error).isprintable()
        return False
    header.file.close()
    return True


def check_never_laxer(path, raw):
    passed = accepted(path, raw)
    event("accepted" if passed else "refused")
    if passed:
        there = dict(safetensors.deserialize(raw))  # raises if the package rejects it
        header = read_header(path)
        header.file.close()
        assert {name: list(t.shape) for name, t in header.tensors.items()} == {n: t["shape"] for n, t in there.items()}


PROPERTY = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@PROPERTY
@given(MUTATIONS, st.booleans())
@pytest.mark.sample(0)
def test_mutated_bytes_are_never_accepted_alone(tmp_path, mutations, fix_length):
    raw = mutate(SEED, mutations)
    if fix_length:
        raw = safetensors_bytes(raw[8:-10], raw[-10:])
    check_never_laxer(tmp_path / "weights.safetensors", raw)


@PROPERTY
@given(st.lists(TENSORS, max_size=3))
@pytest.mark.sample(0)
def test_odd_tables_are_never_accepted_alone(tmp_path, tensors):
    table, size = table_of(tensors)
    check_never_laxer(tmp_path / "weights.safetensors", safetensors_bytes(table, bytes(max(0, min(size, 999)))))


def test_the_seed_itself_is_accepted(tmp_path):
    assert accepted(tmp_path / "weights.safetensors", SEED)
