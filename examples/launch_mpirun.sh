#!/bin/bash
# Trains on several ranks, a process each, on one machine or several.
#
#   launch_mpirun.sh NUM_RANKS RECIPE [--set KEY=VALUE]...
#
# This is for mpirun of Open MPI; that of MPICH does not know --mca.
# HOSTFILE is a file with a machine a line, for instance "node1 slots=8".
# Without it all ranks are on this machine.
# DRY=1 prints the command and runs nothing.
set -euo pipefail
(($# >= 2)) || { echo "usage: $0 NUM_RANKS RECIPE [--set KEY=VALUE]..." >&2; exit 2; }
ranks=$1 recipe=$2
shift 2
moebius=${MOEBIUS:-build/moebius}

# A wrong layout is found here, by one process, before any rank starts.
"$moebius" config "$recipe" "$@" --ranks "$ranks" >/dev/null

# After a SIGTERM the ranks need longer to save than the one second of mpirun.
launch=(mpirun -n "$ranks" ${HOSTFILE:+--hostfile "$HOSTFILE"} --mca odls_base_sigkill_timeout 120
  "$moebius" train "$recipe" "$@")
if [[ -n ${DRY:-} ]]; then
  echo "${launch[@]}"
else
  exec "${launch[@]}"
fi
