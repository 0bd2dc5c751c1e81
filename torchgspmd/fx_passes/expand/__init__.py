"""Operations as others that have rules; fused ones, products and axes in parts."""
