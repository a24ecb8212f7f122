"""DeepSeek Sparse Attention as a library, an engine and a server."""
