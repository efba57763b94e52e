"""The scheduler and everything it decides with: integers and numpy only.

Nothing here imports torch, reads a clock, draws a random number or iterates over a set, so the same
object runs in production, in the simulator, in the tests and in the benchmarks.
"""
