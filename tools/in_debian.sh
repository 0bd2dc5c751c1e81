#!/bin/sh
# Run a command in a folder that debootstrap wrote, in a copy of this checkout's tracked files. It needs root.
#
#     tools/in_debian.sh .venv-trixie python3 -V
#
# The mounts end with the command: they belong to a namespace of its own.
set -eu
root=$(realpath "$1")
shift
rm -rf "$root/checkout"  # files that are gone
mkdir -p "$root/checkout" "$root/etc/ssl/certs"
git ls-files -z --cached --others --exclude-standard | tar --null --files-from - --create | tar --extract --directory "$root/checkout"
cp /etc/hosts /etc/resolv.conf "$root/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"  # also those that only this machine has
exec unshare --mount sh -c '
    root=$1
    shift
    mount --rbind /proc "$root/proc"
    mount --rbind /dev "$root/dev"
    exec chroot "$root" sh -c '\''cd /checkout && exec "$@"'\'' sh "$@"
' sh "$root" "$@"
