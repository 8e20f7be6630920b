#!/bin/bash
# A 64-bit ARM Debian with releases of torch, emulated by qemu, for `make matrix`. Root; some minutes and 2 GB.
#
#   make .venv/.installed-dev                           # in which the server of the matrix runs
#   .venv/bin/pip install transformers==4.57.6          # for the table in docs/agreement.md, which was made with it
#   studies/matrix/arm64.sh DIR 2.4.1 2.10.0            # the edges get the transformers of .venv: it must be the same
#   make matrix MATRIX_FLAGS="'torch 2.4 aarch64=DIR/edge 2.4.1' 'torch 2.10 aarch64=DIR/edge 2.10.0'"
#
# DIR/proc and DIR/sys are this machine's own. At the end, and before DIR is deleted:
#   umount DIR/proc DIR/sys && rm -r DIR
#   echo -1 > /proc/sys/fs/binfmt_misc/qemu-aarch64     # where nothing else needs it: ARM programs run by the emulator
#
# Needs debootstrap and qemu-user-static. From torch 2.11 on the registry's wheels for ARM want CUDA's libraries.
# The network is this machine's: a server on 127.0.0.1 is reached. The project is copied as it is now.
set -eu
dir=$1
shift
project=$(cd "$(dirname "$0")/../.." && pwd)
mountpoint -q /proc/sys/fs/binfmt_misc || mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
[ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ] ||
  echo ':qemu-aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:/usr/bin/qemu-aarch64-static:F' > /proc/sys/fs/binfmt_misc/register
if [ ! -e "$dir/usr/bin/python3" ]; then
  # packages are only unpacked: no maintainer's script runs, so that nothing slow is emulated
  mirror=$(awk '/^URIs:/ { print $2; exit }' /etc/apt/sources.list.d/*.sources 2>/dev/null || true)
  debootstrap --arch=arm64 --foreign --variant=minbase --include=python3,libgomp1,ca-certificates bookworm "$dir" ${mirror:+"$mirror"} >/dev/null
  for deb in "$dir"/var/cache/apt/archives/*.deb; do dpkg-deb -x "$deb" "$dir"; done
fi
transformers=$("$project/.venv/bin/python" -c 'import importlib.metadata as m; print(m.version("transformers"))')
fetch() { # pip's own rules for another machine: wheels only; dependencies by the markers of this one
  python3 -m pip install -q --upgrade --no-cache-dir --only-binary=:all: --python-version 3.11 \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 "$@"
}
fetch --target "$dir/opt/site" grpcio==1.76.0 grpcio-health-checking==1.76.0 protobuf numpy psutil nvidia-ml-py lz4 \
  safetensors pillow xxhash rich "transformers==$transformers" sympy networkx jinja2 fsspec filelock
for release; do fetch --no-deps --target "$dir/opt/torch-$release" "torch==$release"; done
rm -rf "$dir/opt/isthmus" && mkdir -p "$dir/opt/isthmus"
tar -C "$project" -c --exclude=.venv --exclude=.git --exclude='*_cache' . | tar -x -C "$dir/opt/isthmus"
for place in proc sys; do mountpoint -q "$dir/$place" || mount --bind "/$place" "$dir/$place"; done
cat > "$dir/edge" <<END
#!/bin/sh
release=\$1; shift
exec chroot "$dir" env USER=root HOME=/root OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 \\
  PYTHONPATH="/opt/torch-\$release:/opt/site:/opt/isthmus" sh -c 'cd /opt/isthmus && exec python3 "\$@"' edge "\$@"
END
chmod +x "$dir/edge"
for release; do "$dir/edge" "$release" -c 'import torch, platform; print(torch.__version__, platform.machine())'; done
