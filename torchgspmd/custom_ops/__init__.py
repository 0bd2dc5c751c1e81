"""Operations of our own, which stand in captured graphs and in programs beside those of PyTorch."""
