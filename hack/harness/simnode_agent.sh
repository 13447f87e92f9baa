#!/usr/bin/env bash
# simnode_agent.sh STATE FABRIC once|watch: keeps the netdevs of a simulated GPU node.
#
# Runs inside the node and needs bash, iproute2 and coreutils only. STATE/links.tsv lists the netdevs of the machine's
# NICs, a line each: name, MAC ("-": any), MTU, and the PCI device's directory below STATE/sys. Each netdev is one end of a
# veth pair; the other end, of the same name, is a port of the bridge "rails" in the network namespace FABRIC.
#
# A VF outlives the namespace it is in; a veth end dies with it and takes its peer along. So a netdev whose peer has gone
# from FABRIC is made again under its own name. As in the kernel's sysfs, a netdev that is in another namespace is not in
# STATE/sys.
#
#   once   make what is missing and end; exit code 1 when something could not be made
#   watch  do so whenever a link changes in the node or in FABRIC
set -euo pipefail

state=$1 fabric=$2 mode=$3
# Netlink drops notifications when its buffer is full, so look now and then without one. Seconds.
readonly look_anyway=5

names=() failed=0
declare -A mac mtu device
while IFS=$'\t' read -r name link_mac link_mtu link_device; do
  names+=("$name")
  mac[$name]=$link_mac mtu[$name]=$link_mtu device[$name]=$link_device
done < "$state/links.tsv"

log() { echo "simnode: $*" >&2; }

# list_links ARRAY [ip options]: ARRAY[name]=ifindex of the links in a namespace.
list_links() {
  local -n found=$1
  local index link dump _
  shift
  # A list that links came into or left while the kernel wrote it may lack some; ip says so and is asked again.
  until dump=$(ip "$@" -o link show 2>&1) && [[ $dump != *"Dump was interrupted"* ]]; do
    [[ $dump == *"Dump was interrupted"* ]] || { log "ip link: $dump"; exit 1; }
  done
  found=()
  while read -r index link _; do
    link=${link%:}
    found[${link%%@*}]=${index%:}
  done <<< "$dump"
}

make_fabric() {
  [ -e "/run/netns/$fabric" ] || ip netns add "$fabric"
  # Without IPv6 no port of the bridge announces itself.
  ip netns exec "$fabric" sh -c 'echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6' 2>/dev/null || true
  if ! ip -n "$fabric" link show rails > /dev/null 2>&1; then
    ip -n "$fabric" link add rails up type bridge stp_state 0 mcast_snooping 0
  fi
}

# Makes every netdev that is missing, in two batches; fills here[].
make_links() {
  local -A peers
  local name address pairs='' ports=''
  list_links here
  list_links peers -n "$fabric"
  for name in "${names[@]}"; do
    [ -z "${peers[$name]:-}" ] || continue
    if [ -n "${here[$name]:-}" ]; then
      log "a link $name that is not of this machine is in the way"
      failed=1
      continue
    fi
    address=
    [ "${mac[$name]}" = - ] || address="address ${mac[$name]}"
    pairs+="link add $name $address mtu ${mtu[$name]} type veth peer name $name mtu ${mtu[$name]} netns $fabric"$'\n'
    # addrgenmode none: an unused VF does not talk.
    pairs+="link set $name addrgenmode none up"$'\n'
    ports+="link set $name master rails up"$'\n'
  done
  [ -n "$pairs" ] || return 0
  ip -force -batch - <<< "$pairs" || failed=1
  ip -n "$fabric" -force -batch - <<< "$ports" || failed=1
  list_links here
}

# Brings net/<name> and class/net/<name> of the tree in line with here[].
show_links() {
  local name directory away index
  for name in "${names[@]}"; do
    directory=$state/sys/${device[$name]}/net away=$state/away/$name
    if [ -z "${here[$name]:-}" ]; then
      if [ -e "$directory/$name" ]; then
        mkdir -p "$away"
        mv "$directory/$name" "$away/net"
        mv "$state/sys/class/net/$name" "$away/class"
        rmdir --ignore-fail-on-non-empty "$directory"
      fi
      continue
    fi
    index=
    if [ -e "$away/net" ]; then
      echo "${here[$name]}" > "$away/net/ifindex"
      mkdir -p "$directory"
      mv "$away/net" "$directory/$name"
      mv "$away/class" "$state/sys/class/net/$name"
      rmdir "$away"
    elif [ -e "$directory/$name/ifindex" ]; then
      read -r index < "$directory/$name/ifindex"
    fi
    [ "$index" = "${here[$name]}" ] || echo "${here[$name]}" > "$directory/$name/ifindex"
  done
}

reconcile() {
  make_links
  show_links
}

declare -A here
make_fabric
if [ "$mode" = once ]; then
  reconcile
  exit "$failed"
fi

trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
trap 'exit 0' TERM INT
events=$(mktemp -u)
mkfifo "$events"
exec 3<> "$events"
rm "$events"
ip -o monitor link >&3 &
here_monitor=$!
ip -n "$fabric" -o monitor link >&3 &
fabric_monitor=$!
while kill -0 "$here_monitor" && kill -0 "$fabric_monitor"; do
  reconcile
  if read -r -u 3 -t "$look_anyway" _; then
    # Whatever came meanwhile is seen by the same look.
    while read -r -u 3 -t 0; do read -r -u 3 _; done
  fi
done
log "ip monitor ended"
exit 1
