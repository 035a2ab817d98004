#!/bin/sh
# Install the system packages that the build uses and that are missing. Never fails: without liburing or libaio the
# build goes on with the I/O engines that remain, and `infinity doctor` says so.
set -u

missing=""
need() { # need FILE PACKAGE: the package is there if the file is
  [ -e "$1" ] || missing="$missing $2"
}
need /usr/include/liburing.h liburing-dev
need /usr/include/libaio.h libaio-dev
command -v c++ >/dev/null 2>&1 || missing="$missing g++"
python="${1:-python3.11}"
if command -v "$python" >/dev/null 2>&1; then
  version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  "$python" -c 'import ensurepip' 2>/dev/null || missing="$missing $version-venv"
  need "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" "$version-dev"
fi
[ -n "$missing" ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
  echo "setup: missing system packages:$missing (Debian: sudo apt-get install$missing)" >&2
  exit 0
fi
log=$(mktemp)
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 # a list of names
if apt-get install -y -q $missing >"$log" 2>&1 || { apt-get update -q && apt-get install -y -q $missing; } >>"$log" 2>&1
then
  echo "setup: installed$missing"
else
  echo "setup: apt-get could not install$missing; going on without:" >&2
  tail -n 3 "$log" >&2
fi
rm -f "$log"
