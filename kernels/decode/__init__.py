"""Flash-decode in Triton: one query row, the keys split over programs."""
