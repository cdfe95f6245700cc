#!/usr/bin/env python3
"""Fetches what tuning is measured with, from packages whose licences allow it, and checks it by SHA-256.

    platform/benches/datasets.py texts DIR
    platform/benches/datasets.py images DIR

Texts, one paragraph a line, UTF-8:
    austen-train.txt, austen-test.txt   Jane Austen's novels (public domain), Northanger Abbey apart for testing; Debian's
                                        r-cran-janeaustenr (MIT)
    web-train.txt, web-test.txt         the World English Bible (public domain; modern English, short sentences), the last
                                        eighth apart; Debian's sword-text-web
Images:
    train-images-idx3-ubyte and three more   Fashion-MNIST (MIT): 60,000 and 10,000 grey images of 28 x 28, 10 classes,
                                        in the IDX format; Debian's dataset-fashion-mnist
    digits.csv                          1,797 grey images of 8 x 8 (64 numbers 0..16, then the digit), from the UCI
                                        repository (CC BY 4.0); PyPI's scikit-learn 1.7.2 (BSD)

Needs apt-get and dpkg-deb for the first three, pip for the last; installs nothing.
"""

import gzip
import hashlib
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

SHA256 = {
    "austen-train.txt": "b6f0af887a5a7fd65ba908bfd1d78164c4662cfd3a017a46cd57c4c972d7dd97",
    "austen-test.txt": "1429610acb1fbbbae9ef1dd28c93f69c40037ca708af5a7e99ab90cbdca9a545",
    "web-train.txt": "8a524233a92812593f2fb0528a30b6ee9a16ca8618598acca10c028b08dd102c",
    "web-test.txt": "4afbc40d05a39395fecbcee0b43e18135369644c0bce0242be5d1270f38876fe",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "digits.csv": "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8",
}


def debian(name, directory):
    """A package's files, unpacked."""
    get = ["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", name]
    subprocess.run(get, cwd=directory, check=True)
    package = next(directory.glob(name + "_*.deb"))
    subprocess.run(["dpkg-deb", "-x", package, directory / name], check=True)
    return directory / name


def strings(data):
    """The strings of a character vector that R has serialized (XDR, version 2 or 3)."""
    assert data[:2] == b"X\n"
    version = struct.unpack_from(">i", data, 2)[0]
    at = 14
    if version == 3:
        at += 4 + struct.unpack_from(">i", data, at)[0]
    flags, count = struct.unpack_from(">ii", data, at)
    if flags & 255 != 16:
        return []
    at, out = at + 8, []
    for _ in range(count):
        _, size = struct.unpack_from(">ii", data, at)
        out.append(data[at + 8 : at + 8 + max(size, 0)].decode())
        at += 8 + max(size, 0)
    return out


def paragraphs(lines):
    """Lines joined up to the next empty one."""
    return [" ".join(part.split()) for part in "\n".join(lines).split("\n\n") if part.strip()]


def austen(directory):
    root = debian("r-cran-janeaustenr", directory)
    data = (root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    novels = {}
    while data:
        # An object: its size as it was, and a stream of zlib.
        stream = zlib.decompressobj()
        lines = strings(stream.decompress(data[4:]))
        data = stream.unused_data
        if len(lines) > 100:
            novels[lines[0].strip()] = paragraphs(lines)
    assert len(novels) == 6, list(novels)
    test = next(name for name in novels if name.upper().startswith("NORTHANGER"))
    train = [line for name in sorted(novels) if name != test for line in novels[name]]
    return {"austen-train.txt": train, "austen-test.txt": novels[test]}


def web(directory):
    root = debian("sword-text-web", directory) / "usr/share/sword/modules/texts/ztext/engWEB2015eb"
    text = ""
    for part in ("ot", "nt"):
        index, packed = (root / f"{part}.bzs").read_bytes(), (root / f"{part}.bzz").read_bytes()
        books = [zlib.decompress(packed[start : start + size]) for start, size, _ in struct.iter_unpack("<III", index)]
        for book, start, size in struct.iter_unpack("<IIH", (root / f"{part}.bzv").read_bytes()):
            text += books[book][start : start + size].decode() + " "
    text = re.sub(r"<(note|title)\b.*?</\1>", " ", text, flags=re.S)
    # Paragraphs, chapters, groups of lines of a poem.
    text = re.sub(r"<(div|chapter|lg)\b[^>]*>", "\n\n", text)
    text = re.sub(r"</?(w|seg)\b[^>]*>", "", text)
    text = re.sub(r" +([,.;:!?’”)])", r"\1", re.sub(r"<[^>]*>", " ", text))
    text = paragraphs(re.sub(r"([“‘(]) +", r"\1", text).split("\n"))
    # Without the introduction and the glossary.
    first = next(i for i, line in enumerate(text) if line.startswith("In the beginning, God created"))
    last = next(i for i, line in enumerate(text) if line.startswith("The grace of the Lord Jesus Christ be with all"))
    text = text[first : last + 1]
    edge = len(text) * 7 // 8
    return {"web-train.txt": text[:edge], "web-test.txt": text[edge:]}


def texts(directory):
    found = austen(directory) | web(directory)
    return {name: ("\n".join(lines) + "\n").encode() for name, lines in found.items()}


def images(directory):
    root = debian("dataset-fashion-mnist", directory) / "usr/share/datasets/fashion-mnist"
    found = {path.name.removesuffix(".gz"): gzip.decompress(path.read_bytes()) for path in sorted(root.glob("*.gz"))}
    get = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "--python-version"]
    subprocess.run([*get, "3.11", "-d", directory, "scikit-learn==1.7.2"], check=True)
    wheel = zipfile.ZipFile(next(directory.glob("scikit_learn-*.whl")))
    return found | {"digits.csv": gzip.decompress(wheel.read("sklearn/datasets/data/digits.csv.gz"))}


def main(what, target):
    target = Path(target)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        for name, data in {"texts": texts, "images": images}[what](Path(directory)).items():
            digest = hashlib.sha256(data).hexdigest()
            if digest != SHA256[name]:
                sys.exit(f"{name}: SHA-256 is {digest}, not {SHA256[name]}: the package has changed")
            (target / name).write_bytes(data)
            print(f"{digest}  {name}  {len(data)} bytes")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("texts", "images"):
        sys.exit(__doc__)
    main(*sys.argv[1:])
