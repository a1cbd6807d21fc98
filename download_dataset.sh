#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Brings C4 to train on, sizes checked, or the data that evals.py scores, checked by SHA-256. What is there and right is
# not fetched again; what was interrupted goes on where it stopped.
#
#   bash download_dataset.sh [--dry-run] PROJECT BUCKET  C4 (en, 3.0.1, TFRecord, ODC-BY 1.0) into BUCKET/c4/en/3.0.1
#   bash download_dataset.sh [--dry-run] PROJECT FOLDER  the same into a local folder, which begins with / or a dot
#   bash download_dataset.sh [--dry-run] lambada DEST    lambada_test.jsonl (5,153 rows, CC BY 4.0)
#   bash download_dataset.sh [--dry-run] boolq DEST      dev.jsonl (3,270 rows), train.jsonl (9,427 rows), CC BY-SA 3.0
#
# Who reads C4's bucket pays for it: PROJECT is the Google Cloud project that is billed. It needs gcloud or gsutil.
# --dry-run prints the commands instead of running them. DATASET_URL=http://mirror/folder fetches the small files there.
# Exit codes: 0 done, 2 wrong usage (an unknown project or bucket, a tool that is missing), 4 network, permission or
# storage fails (mend it and run again: it goes on), 65 a file is not the one known.

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

# --- C4, from bucket to bucket or folder ------------------------------------------------------------------------------

c4=gs://allennlp-tensorflow-datasets/c4/en/3.0.1

explain() { # what the tool said: ends the script with one line
  local said
  said=$(grep -v '^$' <<<"$1" | grep -i -m 1 'error\|exception\|fail\|denied' || grep -v '^$' <<<"$1" | tail -n 1)
  case $1 in
    *"nknown project"* | *"ser project specified"* | *"roject "*" not found"*)
      fail 2 "PROJECT=$project is no project that can be billed ($said). gcloud projects list shows yours" ;;
    *"active account"* | *"auth login"* | *"nonymous caller"* | *" 401"*)
      fail 4 "nobody is signed in ($said). Run gcloud auth login" ;;
    *" 403"* | *AccessDenied* | *"does not have"*)
      fail 4 "no permission ($said). It takes serviceusage.services.use on $project and storage.objects.create on the \
bucket" ;;
    *"ucket does not exist"* | *"bucket not found"* | *BucketNotFound* | *"b/"*" not found"* | *" 404"*)
      fail 2 "a bucket is not there ($said). Make it: gcloud storage buckets create ${where%/c4/en/3.0.1}" ;;
    *"o space left"*) fail 4 "DEST=$where is full ($said). Make room and run again: it goes on" ;;
    *) fail 4 "${tool[*]:0:2} failed (${said:-without a word}). Run again: it goes on where it stopped" ;;
  esac
}

sizes() { # folder in a bucket: lines of name and bytes, nothing where there is none
  local listing
  if listing=$("${list[@]}" "$1/*" 2>&1); then
    awk -v folder="$1/" 'index($3, folder) == 1 && $3 !~ /[\/:]$/ { print substr($3, length(folder) + 1), $1 }' \
      <<<"$listing"
  else
    [[ $1 != "$c4" && $listing == *"matched no objects"* ]] || { printf '%s\n' "$listing" && return 1; }
  fi
}

here() { # lines of name and bytes of the files that the copy has
  local name bytes
  case $where in
    gs://*) sizes "$where" ;;
    *) while read -r name _; do
      ! bytes=$(wc -c <"$where/$name") || printf '%s %d\n' "$name" "$bytes"
    done <<<"$known" 2>/dev/null ;;
  esac
}

missing() { # the names of known that here() lacks, or has with other sizes
  local found
  found=$(here) || { printf '%s\n' "$found" && return 1; }
  awk 'NR == FNR { size[$1] = $2; next } size[$1] != $2 { print $1 }' <(printf '%s\n' "$found") \
    <(printf '%s\n' "$known")
}

copy_c4() { # project, destination
  local project=$1 where=${2%/} known names count bytes room reason
  if command -v gcloud >/dev/null; then
    list=(gcloud storage ls --long "--billing-project=$project")
    tool=(gcloud storage cp "--billing-project=$project" --read-paths-from-stdin)
  elif command -v gsutil >/dev/null; then
    list=(gsutil -u "$project" ls -l)
    tool=(gsutil -m -u "$project" cp -I)
  else
    fail 2 "neither gcloud nor gsutil is there to copy C4 with. Install the Google Cloud CLI: \
https://cloud.google.com/sdk/docs/install"
  fi
  case $where in
    '' | /* | .*) ;;
    gs://?*) ;;
    *) where=gs://$where ;;
  esac
  where=$where/c4/en/3.0.1
  if [ -n "$dry_run" ]; then
    printf '+ %s%s\n' "$(printf '%q ' "${list[@]}" "$c4/*")" "# names and sizes"
    [[ $where == gs://* ]] || printf '+ %s\n' "mkdir -p $(printf %q "$where")"
    printf '+ %s%s\n' "$(printf '%q ' "${tool[@]}" "$where/")" "# the names that are not there in the right size"
    return
  fi
  known=$(sizes "$c4") || explain "$known"
  [ -n "$known" ] || fail 4 "$c4 holds no file. Run again later"
  if [[ $where != gs://* ]]; then
    reason=$(mkdir -p "$where" 2>&1 && [ -w "$where" ] 2>&1) ||
      fail 4 "DEST=$where cannot be written to (${reason:-no right to}). Choose another"
  fi
  names=$(missing) || explain "$names"
  read -r count bytes < <(awk 'NR == FNR { need[$1]; next } $1 in need { n++; sum += $2 }
    END { printf "%d %.0f\n", n, sum }' <(printf '%s\n' "$names") <(printf '%s\n' "$known"))
  say "$c4: $(wc -l <<<"$known") files, of which $count ($bytes bytes) are to be copied to $where"
  if [ -n "$names" ]; then
    if [[ $where != gs://* ]]; then
      room=$(df -Pk "$where" | awk 'NR == 2 { printf "%.0f", $4 * 1024 }')
      awk -v need="$bytes" -v room="$room" 'BEGIN { exit need > room }' ||
        fail 4 "DEST=$where has room for $room bytes, and $bytes are missing. Make room and run again: it goes on"
    fi
    reason=$(awk -v folder="$c4/" '{ print folder $0 }' <<<"$names" | "${tool[@]}" "$where/" 2>&1 >/dev/null) ||
      explain "$reason"
    names=$(missing) || explain "$names"
    [ -z "$names" ] || fail 65 "$where/${names%%$'\n'*} has not the size of the one in $c4 after the copy. Run again"
  fi
  say "$where is right: $(wc -l <<<"$known") files have the sizes of their sources"
}

case ${1:-} in
  lambada) files=$lambada ;;
  boolq) files=$boolq ;;
  *)
    usage="Usage: bash download_dataset.sh [--dry-run] PROJECT BUCKET|FOLDER, or lambada|boolq DEST"
    [[ ${1:-} =~ ^([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]$ ]] ||
      fail 2 "'${1:-}' is no project's ID (6 to 30 lowercase letters, digits, dashes), lambada or boolq. $usage"
    [ $# = 2 ] || fail 2 "PROJECT=$1 needs one bucket or folder to copy C4 to, given: '${*:2}'. $usage"
    [[ $2 =~ ^([./].*|(gs://)?[a-z0-9][a-z0-9._-]+[a-z0-9](/.*)?)$ ]] ||
      fail 2 "DEST=$2 is neither a bucket nor a folder that begins with / or a dot. $usage"
    copy_c4 "$1" "$2"
    exit
    ;;
esac

# --- Small files, over HTTP -------------------------------------------------------------------------------------------

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
