"""What benchmarks and tests both drive: engines by hand, systems as processes, checkpoints."""
