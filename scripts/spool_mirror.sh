#!/usr/bin/env bash
# Mirror the spool of one site, both ways, from the machine of the hub: what islands say up, what the hub says down.
#
#     scripts/spool_mirror.sh [options] HOST:/shared/fs/spool /srv/spool/mn5
#
#     --once            one round, then end: 0 if it went through, 1 if not
#     --every SECONDS   from one round to the next (10)
#     --retries N       tries of a transfer in one round (3)
#     --wait SECONDS    before the first further try; it doubles with each (2)
#     --bwlimit RATE    at most so much, as rsync takes it: 20m = 20 MiB/s (no limit)
#     --rsh COMMAND     how rsync reaches HOST (ssh with a time-out); HOST may be left out for a folder of this machine
#
# A site that is out of reach for a day is nothing special: it is said once, and once when it is back. Of two mirrors of one
# folder the second ends at once, with code 3. Files are never changed once they have their name, so those that are there
# are not compared; parts go before the manifests that name them, files in the making (.*) do not go at all; what its writer
# has deleted is deleted in the copy.
set -euo pipefail

once=0 every=10 retries=3 wait=2 bwlimit="" rsh="ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15"
while [ "$#" -gt 2 ]; do
    case "$1" in
        --once) once=1; shift ;;
        --every) every="$2"; shift 2 ;;
        --retries) retries="$2"; shift 2 ;;
        --wait) wait="$2"; shift 2 ;;
        --bwlimit) bwlimit="$2"; shift 2 ;;
        --rsh) rsh="$2"; shift 2 ;;
        *) echo "unknown option $1" >&2; exit 2 ;;
    esac
done
if [ "$#" -ne 2 ] || [ "${1:0:2}" = "--" ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
remote="${1%/}" here="${2%/}"
for program in rsync flock; do
    command -v "$program" >/dev/null || { echo "$program is not installed" >&2; exit 2; }
done

mkdir -p "$here/up" "$here/down"
exec 9>"$here/.mirror.lock"
if ! flock -n 9; then
    echo "another mirror of $here is running" >&2
    exit 3
fi

log() { printf '%s %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$*" >&2; }

# One transfer of what ends in $1, from $2 to $3. Big ones that are cut go on where they were. What vanishes meanwhile
# (code 24) has been deleted by its writer.
transfer() {
    local code=0
    rsync --recursive --times --ignore-existing --delete --partial-dir=.partial --timeout=120 --rsh="$rsh" \
        ${bwlimit:+--bwlimit="$bwlimit"} --exclude='.*' --include='*/' --include="*.$1" --exclude='*' \
        "$2/" "$3/" 9>&- || code=$?
    [ "$code" -eq 0 ] || [ "$code" -eq 24 ]
}

insist() {
    local pause="$wait" try
    for ((try = 1; ; try++)); do
        transfer "$@" && return 0
        [ "$try" -ge "$retries" ] && return 1
        sleep "$pause"
        pause=$((pause * 2))
    done
}

round() {
    insist bin "$remote/up" "$here/up" && insist json "$remote/up" "$here/up" &&
        insist bin "$here/down" "$remote/down" && insist json "$here/down" "$remote/down"
}

away=0
while true; do
    if round; then
        [ "$away" -eq 0 ] || log "$remote is back"
        away=0
        [ "$once" -eq 0 ] || exit 0
    else
        [ "$away" -ne 0 ] || log "$remote is out of reach, or no island has made its folders yet; trying again every $every s"
        away=1
        [ "$once" -eq 0 ] || exit 1
    fi
    sleep "$every" 9>&-
done
