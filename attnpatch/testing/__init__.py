"""What tests, benchmarks and users share: the float64 reference, the allowed error, named inputs."""
