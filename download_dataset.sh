#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Downloads the data that evals.py scores, checked by SHA-256. What is there and right is not fetched again; what was
# interrupted goes on where it stopped.
#
#   bash download_dataset.sh [--dry-run] lambada DEST    lambada_test.jsonl (5,153 rows, CC BY 4.0)
#   bash download_dataset.sh [--dry-run] boolq DEST      dev.jsonl (3,270 rows), train.jsonl (9,427 rows), CC BY-SA 3.0
#
# --dry-run prints the commands instead of running them. DATASET_URL=http://mirror/folder fetches the same files there.
# Exit codes: 0 done, 2 wrong usage, 4 network or storage fails (run again: it goes on), 65 a file is not the one known.

set -u -o pipefail

# Lines of: name sha256 bytes url. The checksums are on public record: LAMBADA's in EleutherAI's lm-evaluation-harness
# (lm_eval/tasks/lambada.py), BoolQ's in TensorFlow Datasets (text/bool_q/checksums.tsv) and in Hugging Face datasets.
lambada="lambada_test.jsonl 4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226 1819752 \
https://openaipublic.blob.core.windows.net/gpt-2/data"
boolq_url=https://storage.googleapis.com/boolq
boolq="dev.jsonl ebc29ea3808c5c611672384b3de56e83349fe38fc1fe876fd29b674d81d0a80a 2238726 $boolq_url
train.jsonl cc7a79d44479867e8323a7b0c5c1d82edf516ca34912201f9384c3a3d098d8db 6525813 $boolq_url"

say() { printf 'download: %s\n' "$*"; }
fail() { # code, message
  printf 'download: %s\n' "$2" >&2
  exit "$1"
}

dry_run=
arguments=()
for argument in "$@"; do
  case $argument in
    -h | --help) sed -n '4,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    --dry-run) dry_run=1 ;;
    -*) fail 2 "unknown option $argument. Usage: bash download_dataset.sh [--dry-run] lambada|boolq DEST" ;;
    *) arguments+=("$argument") ;;
  esac
done
set -- ${arguments[@]+"${arguments[@]}"}
case ${1:-} in
  lambada) files=$lambada ;;
  boolq) files=$boolq ;;
  *) fail 2 "dataset=${1:-} is neither lambada nor boolq (C4 is not among them). \
Usage: bash download_dataset.sh [--dry-run] lambada|boolq DEST" ;;
esac
if [ $# != 2 ] || [ -z "$2" ]; then
  fail 2 "$1 needs one folder to be written to, given: '${*:2}'. Usage: bash download_dataset.sh [--dry-run] $1 DEST"
fi
folder=${2%/}
case $folder in
  '') folder=/ ;;
  *://*) fail 2 "DEST=$folder is no local folder. Download to one, then copy it there, e.g. with gsutil" ;;
  -*) folder=./$folder ;;
esac

if command -v sha256sum >/dev/null; then
  hash() { sha256sum <"$1" | cut -d ' ' -f 1; }
elif command -v shasum >/dev/null; then # macOS
  hash() { shasum -a 256 <"$1" | cut -d ' ' -f 1; }
else
  fail 2 "neither sha256sum nor shasum is there to check with. Install coreutils"
fi
is_right() { [ -f "$1" ] && [ "$(hash "$1")" = "$2" ]; } # file, sha256

if command -v curl >/dev/null; then
  fetch() { # url, file: goes on behind what is in the file
    curl --fail --location --silent --show-error --connect-timeout 30 --speed-limit 1 --speed-time 60 \
      --retry 3 --retry-delay 2 --continue-at - --output "$2" "$1"
  }
  tool=(curl --fail --location --continue-at - --output)
elif command -v wget >/dev/null; then
  fetch() { wget --no-verbose --tries=4 --waitretry=2 --timeout=60 --continue --output-document="$2" "$1"; }
  tool=(wget --continue --output-document)
else
  fail 2 "neither curl nor wget is there to download with. Install one"
fi

# --- The files --------------------------------------------------------------------------------------------------------

download() { # name, sha256, bytes, url: into folder/name, by way of folder/name.part
  local file=$folder/$1 url=${DATASET_URL:-$4} part=$folder/$1.part reason code found
  url=${url%/}/$1
  if is_right "$file" "$2"; then
    say "$file is there"
    return
  elif [ -e "$file" ]; then
    fail 65 "$file is not the file known (its SHA-256 is not $2). Move it away and run again"
  fi
  if [ -n "$dry_run" ]; then
    printf '+ %s\n' "mkdir -p $(printf %q "$folder")" "$(printf '%q ' "${tool[@]}" "$part" "$url")" \
      "$(printf '%q ' mv "$part" "$file") # if its SHA-256 is $2"
    return
  fi
  reason=$(mkdir -p "$folder" 2>&1 && { : >>"$part"; } 2>&1) ||
    fail 4 "DEST=$folder cannot be written to (${reason##*: }). Choose another, or make room"
  [ "$(wc -c <"$part")" -lt "$3" ] || is_right "$part" "$2" || rm -f "$part"
  if ! is_right "$part" "$2"; then
    say "$url ($3 bytes)"
    reason=$(fetch "$url" "$part" 2>&1)
    code=$?
    if [ $code = 33 ] && [ -s "$part" ]; then # a server that cannot go on in the middle
      rm -f "$part"
      reason=$(fetch "$url" "$part" 2>&1)
      code=$?
    fi
    if [ $code != 0 ]; then
      [ -s "$part" ] || rm -f "$part"
      reason=$(printf '%s' "$reason" | tail -n 1)
      fail 4 "$url cannot be fetched (${reason:-${tool[0]} ended with $code}). Run again: it goes on where it stopped. \
Or name a mirror: DATASET_URL=http://mirror/folder"
    fi
  fi
  if ! is_right "$part" "$2"; then
    found=$(hash "$part")
    rm -f "$part"
    fail 65 "$url gave another file than the one known (SHA-256 $found instead of $2), which is removed. \
Run again, or name a mirror: DATASET_URL=http://mirror/folder"
  fi
  reason=$(mv "$part" "$file" 2>&1) || fail 4 "$file cannot be written (${reason##*: })"
  say "$file is right"
}

while read -r name sha256 bytes url; do
  download "$name" "$sha256" "$bytes" "$url" </dev/null || exit
done <<<"$files"
