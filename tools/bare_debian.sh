#!/usr/bin/env bash
# Shows that both commands of the README work on a bare Debian 12: a root made by debootstrap, with git and certificates alone.
# The root has no make, no Python and no CUDA; what the commands need they install there themselves.
#
# usage (as root): tools/bare_debian.sh [demo] [test] [build]      commands of ./dev; without any: demo test
#
# The committed state of this checkout is what runs. MOEBIUS_BARE_ROOT names the folder of the root (default: a new one in
# /var/tmp); it is removed at the end, also after a failure. INT and TERM end
# the running command with all that it started, and then remove it too. MOEBIUS_BARE_MIRROR is debootstrap's mirror.
set -euo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
  printf 'bare_debian: %s\n' "$*" >&2
  exit 1
}

# The root is removed at the end, so nothing may be in the folder before.
if [[ -n ${MOEBIUS_BARE_ROOT:-} && -e $MOEBIUS_BARE_ROOT ]]; then
  [[ -d $MOEBIUS_BARE_ROOT && -z $(ls -A "$MOEBIUS_BARE_ROOT") ]] ||
    fail "MOEBIUS_BARE_ROOT: expected a new or an empty folder; got $MOEBIUS_BARE_ROOT, which has something in it; name another"
fi
[[ $(id -u) == 0 ]] || fail "must run as root: it makes a root folder and changes into it; got user $(id -un)"
command -v debootstrap >/dev/null || fail "debootstrap is missing; apt-get install debootstrap"
[[ -z $(git -C "$project" status --porcelain) ]] || fail "the checkout has changes that are not committed; commit or stash them first"

root=${MOEBIUS_BARE_ROOT:-$(mktemp -d /var/tmp/bare_debian.XXXXXX)}
mkdir -p "$root"
root=$(realpath "$root")

unmount() {
  local place
  for place in dev/pts dev/shm dev proc; do
    if mountpoint --quiet "$root/$place"; then umount --lazy "$root/$place"; fi
  done
}
# The processes in the root: of its commands, and of what they left running.
processes() {
  local process
  for process in /proc/[0-9]*; do
    if [[ $(readlink "$process/root" 2>/dev/null) == "$root" ]]; then echo "${process#/proc/}"; fi
  done
}
clean_up() {
  local left
  left=$(processes)
  # shellcheck disable=SC2086  # one argument a process
  if [[ -n $left ]]; then kill -KILL $left 2>/dev/null || true; fi
  unmount
  rm -rf --one-file-system "$root"
  rm -f "$root.log"
}
trap clean_up EXIT

# Runs a command in a process group of its own. bash runs its traps while it waits for a background command, but not while one in
# the foreground runs: so a signal ends the group at once, and the root is removed.
group=""
run() {
  setsid "$@" &
  group=$!
  local status=0
  wait "$group" || status=$?
  group=""
  return "$status"
}
stop() {
  trap '' INT TERM
  if [[ -n $group ]]; then
    kill -TERM -- "-$group" 2>/dev/null || true
    for _ in {1..50}; do
      kill -0 -- "-$group" 2>/dev/null || break
      sleep 0.1
    done
    kill -KILL -- "-$group" 2>/dev/null || true
  fi
  exit "$1"
}
trap 'stop 130' INT
trap 'stop 143' TERM

run debootstrap --variant=minbase --include=git,ca-certificates bookworm "$root" ${MOEBIUS_BARE_MIRROR:+"$MOEBIUS_BARE_MIRROR"} >"$root.log" ||
  fail "debootstrap failed: $(tail -n 3 "$root.log")"
# The way to the package mirror is that of this machine: it is no part of what is shown.
cp -a /etc/apt/. "$root/etc/apt/"
cp -L /etc/resolv.conf "$root/etc/resolv.conf"
cp -L /etc/hosts "$root/etc/hosts"
cp -a /etc/ssl/certs/. "$root/etc/ssl/certs/"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --make-rslave "$root/dev"
run git clone --quiet "$project" "$root/moebius"

commands=("$@")
(($#)) || commands=(demo test)
status=0
for command in "${commands[@]}"; do
  printf '== ./dev %s in a bare Debian 12\n' "$command"
  start=$SECONDS
  run env -i HOME=/root TERM=dumb LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    chroot "$root" /bin/bash -c "cd /moebius && ./dev $command" </dev/null || status=$?
  printf '== ./dev %s: exit %d after %d s\n' "$command" "$status" "$((SECONDS - start))"
  ((status == 0)) || break
done
exit "$status"
