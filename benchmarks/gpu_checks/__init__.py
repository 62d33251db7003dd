"""The parts of `gpu.sh`. Each runs in a process, and keeps what it has found if it fails or ends
late."""
