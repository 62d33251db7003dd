"""One run: launch, process group, output folder, lock, resume, watchdog, logs. Skip it at first
reading."""
