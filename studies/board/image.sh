#!/bin/bash
# Makes the disks of an emulated 64-bit ARM board: a Debian with systemd and a kernel, and packages for pip. Root.
#
#   studies/board/image.sh DIR [torch release, default 2.4.1]     about fifteen minutes, 4 GB
#
# DIR/root.img      the system: its own root, /boot, an empty /var/lib/isthmus
# DIR/packages.img  /media/packages: wheels of Isthmus (twice: this version and one that counts as the next), torch and
#                   all they need, for pip without a network
# DIR/vmlinuz, DIR/initrd.img
#
# Needs debootstrap, qemu-user-static, binfmt_misc with an entry for aarch64 (studies/matrix/arm64.sh makes it).
set -eu
dir=$1
torch=${2:-2.4.1}
project=$(cd "$(dirname "$0")/../.." && pwd)
python=$project/.venv/bin/python
mkdir -p "$dir"
root=$dir/root
if [ ! -e "$dir/vmlinuz" ]; then
  mirror=$(awk '/^URIs:/ { print $2; exit }' /etc/apt/sources.list.d/*.sources 2>/dev/null || true)
  debootstrap --arch=arm64 --variant=minbase \
    --include=systemd-sysv,udev,dbus,kmod,procps,iproute2,python3,python3-venv,libgomp1,ca-certificates,initramfs-tools \
    bookworm "$root" ${mirror:+"$mirror"} > "$dir/debootstrap.log"
  echo MODULES=list > "$root/etc/initramfs-tools/conf.d/few"  # with all of them its making is emulated for many minutes
  printf 'virtio_pci\nvirtio_blk\next4\n' >> "$root/etc/initramfs-tools/modules"
  chroot "$root" apt-get install -y -qq --no-install-recommends linux-image-arm64 >> "$dir/debootstrap.log"
  cp "$root"/boot/vmlinuz-* "$dir/vmlinuz"
  cp "$root"/boot/initrd.img-* "$dir/initrd.img"
  rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
fi

packages=$dir/packages
mkdir -p "$packages"
fetch() { # wheels for the board, by pip's own rules
  "$python" -m pip download -q --dest "$packages" --only-binary=:all: --python-version 3.11 \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 "$@"
}
[ -n "$(find "$packages" -name 'torch-*')" ] || fetch --no-deps "torch==$torch"
[ -n "$(find "$packages" -name 'grpcio-*')" ] || fetch -c "$project/constraints.txt" grpcio grpcio-health-checking protobuf \
  numpy psutil nvidia-ml-py lz4 zstandard safetensors pillow xxhash rich av sympy networkx jinja2 fsspec filelock typing-extensions
rm -rf "$packages"/isthmus-* "$packages/pictures"
[ -n "$(find "$packages" -name 'onnxruntime-*')" ] || fetch -c "$project/constraints.txt" onnxruntime
source=$(mktemp -d)
git -C "$project" ls-files -z | tar -C "$project" -c --null -T - | tar -x -C "$source"
for version in 0.2.0 0.2.1; do
  sed -i "s/^__version__ = .*/__version__ = \"$version\"/" "$source/shared_hooks/version.py"
  "$python" -m pip wheel -q --no-deps --no-build-isolation --wheel-dir "$packages" "$source"
done
mkdir -p "$packages/deploy" && cp -r "$source/deploy/edge" "$packages/deploy/"
cp "$source"/studies/board/sender.* "$packages/"
cp -r "$source/shared_hooks/models/digits/images" "$packages/pictures"
rm -r "$source"
rm -rf "$packages/heads"
"$project/.venv/bin/edge-client" export --model digits --split stem.2,stage2.0.conv2 --output "$packages/heads" > "$dir/export.log"

rm -f "$dir"/*.img.part
echo isthmus-board > "$root/etc/hostname"
printf '[global]\nno-index = true\nfind-links = /media/packages\n' > "$root/etc/pip.conf"
cat > "$root/etc/fstab" <<FSTAB
/dev/vda  /                 ext4   ro,noatime                    0 1
/dev/vdb  /media/packages   ext4   ro,nofail                     0 0
/dev/vdc  /var/lib/isthmus  ext4   noatime,nodev,nosuid          0 2
tmpfs     /tmp              tmpfs  nosuid,nodev,size=10%         0 0
tmpfs     /var/log          tmpfs  nosuid,nodev,size=5%          0 0
tmpfs     /var/tmp          tmpfs  nosuid,nodev,size=5%          0 0
FSTAB
mkdir -p "$root/media/packages" "$root/var/lib/isthmus" "$root/etc/systemd/system/serial-getty@ttyAMA0.service.d"
# the console is root's, without a password: the study types there
cat > "$root/etc/systemd/system/serial-getty@ttyAMA0.service.d/login.conf" <<LOGIN
[Service]
ExecStart=
ExecStart=-/sbin/agetty --autologin root --noclear ttyAMA0 dumb
LOGIN
truncate -s 4G "$dir/root.img.part" && mkfs.ext4 -q -d "$root" "$dir/root.img.part"
truncate -s 1G "$dir/packages.img.part" && mkfs.ext4 -q -d "$packages" "$dir/packages.img.part"
mv "$dir/root.img.part" "$dir/root.img" && mv "$dir/packages.img.part" "$dir/packages.img"
ls -sh "$dir"
