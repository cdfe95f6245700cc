#!/usr/bin/env bash
# Puts a static binary on a board. usage: install.sh USER@BOARD [FOLDER]
set -euo pipefail
board=${1:?usage: install.sh USER@BOARD [FOLDER]}
folder=${2:-/usr/local/bin}
binary=${LEANSTREAM_BINARY:-target/aarch64-unknown-linux-musl/release/leanstream}
[ -f "$binary" ] || { echo "$binary is not there; build it with 'just static-aarch64'" >&2; exit 1; }
sum=$(sha256sum "$binary" | cut -d ' ' -f 1)
aside="$folder/.leanstream.$sum"
scp "$binary" "$board:$aside"
# Checked, made executable and renamed in one go: a broken connection leaves the old one.
ssh "$board" "echo '$sum  $aside' | sha256sum -c - && chmod 755 '$aside' && mv '$aside' '$folder/leanstream' && '$folder/leanstream' --version"
