"""From values to tables: means, intervals, differences, ranks, voxel counts, and facts about the data."""
