"""The machine that cbatch runs on: cache folder, processors, memory, logs. No cbatch imports."""
