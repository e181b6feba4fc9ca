"""The arithmetic that reads and writes pages. Knows tensors and shapes; knows neither requests nor blocks' owners."""
