#!/bin/bash
# Makes Docker usable on a bare Debian or Ubuntu machine, without systemd and without an image registry:
# installs the engine, starts the daemon, and makes the image `tmax-base` out of the machine's own package archive.
# Run as root; what is already there is left alone, so it may be run any number of times.
#
#   TMAX_DOCKER_ROOT   where the daemon keeps images and containers   (/var/lib/tmax-docker)
#   TMAX_BASE_CACHE    where the base's tarball is kept               (/var/cache/tmax)
set -euo pipefail

root=${TMAX_DOCKER_ROOT:-/var/lib/tmax-docker}
cache=${TMAX_BASE_CACHE:-/var/cache/tmax}
run=/run/tmax-docker
log=/var/log/tmax-dockerd.log
image=tmax-base
packages=ca-certificates,procps,python3,sqlite3

say() { echo "ci_docker: $*" >&2; }
fail() { say "$*"; exit 1; }
answers() { timeout 10 docker info >/dev/null 2>&1; }
# Whether the process that a file names lives and is the program it should be.
alive() { [ -s "$1" ] && [ "$(cat "/proc/$(<"$1")/comm" 2>/dev/null)" = "$2" ]; }

[ "$(id -u)" = 0 ] || fail "must run as root (it installs packages and starts dockerd)"

# One run at a time: two daemons on one data root destroy it.
mkdir -p "$run"
exec 9>"$run/setup.lock"
flock 9

# The engine, what it needs for its bridge network, and the tool that makes a root file system.
missing=()
command -v dockerd >/dev/null || missing+=(docker.io)
command -v iptables >/dev/null || missing+=(iptables)
command -v debootstrap >/dev/null || missing+=(debootstrap)
if [ "${#missing[@]}" -gt 0 ]; then
    say "installing ${missing[*]}"
    apt-get update -q >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}" >&2
fi

# The daemon, only where none answers. One of an earlier run may be on its way up or down, which is waited for.
end_containerd() {
    # A containerd that has outlived its daemon makes the next daemon hang.
    local file=$run/exec/containerd/containerd.pid left
    if alive "$file" containerd; then
        left=$(<"$file")
        say "ending a containerd ($left) that outlived its daemon"
        kill "$left" 2>/dev/null || true
        for _ in {1..50}; do alive "$file" containerd || break; sleep 0.1; done
        kill -9 "$left" 2>/dev/null || true
    fi
    rm -f "$run/dockerd.pid" "$file"
}
started=
for _ in {1..120}; do
    answers && break
    if ! alive "$run/dockerd.pid" dockerd && { [ -z "$started" ] || ! kill -0 "$started" 2>/dev/null; }; then
        [ -z "$started" ] || { tail -n 20 "$log" >&2; fail "dockerd ended as it started"; }
        end_containerd
        say "starting dockerd, log in $log"
        # The lock's descriptor is closed, or the daemon would hold the lock for as long as it lives.
        setsid dockerd --data-root "$root" --exec-root "$run/exec" --pidfile "$run/dockerd.pid" \
            >>"$log" 2>&1 </dev/null 9>&- &
        started=$!
    fi
    sleep 0.5
done
answers || { tail -n 20 "$log" >&2; fail "dockerd did not answer within a minute"; }

# The base image: the machine's own release, from the archive that apt is set up with.
if ! docker image inspect "$image" >/dev/null 2>&1; then
    release=$(. /etc/os-release && echo "$VERSION_CODENAME")
    tarball=$cache/base-$release-$(echo "$packages" | sha256sum | cut -c1-12).tar
    if [ ! -s "$tarball" ]; then
        # shellcheck disable=SC2016  # apt expands these, not bash
        mirror=$(apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(CREATED_BY) $(REPO_URI)' |
            awk -v release="$release" '$1 == release && $2 == "main" && $3 == "Packages" { print $4; exit }')
        [ -n "$mirror" ] || fail "apt's sources have no archive for $release main"
        mkdir -p "$cache"
        work=$(mktemp -d "$cache/debootstrap.XXXXXX")
        trap 'rm -rf "$work"' EXIT
        say "making a root file system of $release"
        debootstrap --variant=minbase --include="$packages" "$release" "$work/root" "$mirror" >"$work/log" 2>&1 ||
            { tail -n 20 "$work/log" >&2; fail "debootstrap failed"; }
        # What apt can fetch again is left out: half of the size.
        rm -rf "$work/root"/var/lib/apt/lists/* "$work/root"/var/cache/apt/* "$work/root"/var/log/*
        # Renamed last, so that a killed run leaves no half tarball behind.
        tar -C "$work/root" --numeric-owner -cf "$work/base.tar" .
        mv "$work/base.tar" "$tarball"
    fi
    docker import --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
        --change 'CMD ["/bin/bash"]' "$tarball" "$image" >/dev/null
    say "made $image out of $tarball"
fi

say "docker $(docker version --format '{{.Server.Version}}') answers and has $image"
