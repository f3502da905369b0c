#!/bin/bash
# PID 1 of one virtual node, inside its own network, UTS, mount and PID namespaces.
# It reaps what its jobs orphan. When it dies, the kernel kills everything that runs in the node.
# usage: node_init.sh NODE HOSTS_FILE
hostname "$1" || exit 1
mount --bind "$2" /etc/hosts || exit 1
[ -e /etc/resolv.conf ] && mount --bind /dev/null /etc/resolv.conf # no DNS here: say so at once
ip link set lo up
has_address() { ip -4 -oneline address show eth0 2>/dev/null | grep -q inet; }
for ((i = 0; i < 500; i++)); do # the tool outside gives this namespace its eth0
    has_address && break
    sleep 0.02
done
has_address || exit 1
slurmd -D &
slurmd=$!
trap 'kill "$slurmd"' TERM
while kill -0 "$slurmd" 2>/dev/null; do
    wait "$slurmd" # returns early when a signal was trapped
done
