#!/bin/sh
# A link whose rate changes: MBITS="100 5 50 1", EACH seconds each, over and over. Only what leaves is shaped: an answer is
# small. The bucket holds 10 ms of its rate, 16 KiB at least, and the queue before it 100 ms, 64 KiB at least.
set -eu
device=eth0
ip link set "$device" gso_max_size 8192 # a bucket forgives what is larger than it is
while :; do
  for mbits in $MBITS; do
    burst=$((mbits * 1250))
    queue=$((mbits * 12500))
    [ "$burst" -gt 16384 ] || burst=16384
    [ "$queue" -gt 65536 ] || queue=65536
    tc qdisc replace dev "$device" root tbf rate "${mbits}mbit" burst "$burst" limit $((queue + burst))
    echo "link: $mbits Mbit/s"
    touch /tmp/shaped
    sleep "${EACH:-20}"
  done
done
