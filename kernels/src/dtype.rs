//! Weight types and a matrix of weights that is read where it lies.

use crate::KernelError;

/// How the weights of a matrix are stored. The block layouts are those of GGUF files, byte for byte, little endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are the documentation")]
pub enum WeightType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

impl WeightType {
    /// Every weight type.
    pub const ALL: [WeightType; 11] = [
        WeightType::F32,
        WeightType::F16,
        WeightType::BF16,
        WeightType::Q4_0,
        WeightType::Q4_1,
        WeightType::Q5_0,
        WeightType::Q5_1,
        WeightType::Q8_0,
        WeightType::Q4K,
        WeightType::Q5K,
        WeightType::Q6K,
    ];

    /// Weights in one block; 1 for the float types.
    pub const fn block_len(self) -> usize {
        match self {
            WeightType::F32 | WeightType::F16 | WeightType::BF16 => 1,
            WeightType::Q4_0 | WeightType::Q4_1 | WeightType::Q5_0 | WeightType::Q5_1 | WeightType::Q8_0 => 32,
            WeightType::Q4K | WeightType::Q5K | WeightType::Q6K => 256,
        }
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            WeightType::F32 => 4,
            WeightType::F16 | WeightType::BF16 => 2,
            WeightType::Q4_0 => 2 + 16,
            WeightType::Q4_1 => 2 + 2 + 16,
            WeightType::Q5_0 => 2 + 4 + 16,
            WeightType::Q5_1 => 2 + 2 + 4 + 16,
            WeightType::Q8_0 => 2 + 32,
            WeightType::Q4K => 2 + 2 + 12 + 128,
            WeightType::Q5K => 2 + 2 + 12 + 32 + 128,
            WeightType::Q6K => 128 + 64 + 16 + 2,
        }
    }

    /// Bytes of a row of `cols` weights; `None` if that is not whole blocks or does not fit in a `usize`.
    pub const fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_len()) {
            return None;
        }
        (cols / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Whether the weights are floats on their own, without a shared scale.
    pub const fn is_float(self) -> bool {
        self.block_len() == 1
    }

    /// Name as the field writes it.
    pub const fn name(self) -> &'static str {
        match self {
            WeightType::F32 => "F32",
            WeightType::F16 => "F16",
            WeightType::BF16 => "BF16",
            WeightType::Q4_0 => "Q4_0",
            WeightType::Q4_1 => "Q4_1",
            WeightType::Q5_0 => "Q5_0",
            WeightType::Q5_1 => "Q5_1",
            WeightType::Q8_0 => "Q8_0",
            WeightType::Q4K => "Q4_K",
            WeightType::Q5K => "Q5_K",
            WeightType::Q6K => "Q6_K",
        }
    }
}

/// A `[rows][cols]` matrix of weights in bytes that someone else owns, usually a mapped file. The bytes need no alignment.
#[derive(Debug, Clone, Copy)]
pub struct Weight<'a> {
    dtype: WeightType,
    rows: usize,
    cols: usize,
    row_bytes: usize,
    data: &'a [u8],
}

impl<'a> Weight<'a> {
    /// `data` holds the rows one after the other.
    ///
    /// # Errors
    ///
    /// If `cols` is not whole blocks of `dtype`, or `data` is not exactly as long as the matrix.
    pub fn new(dtype: WeightType, rows: usize, cols: usize, data: &'a [u8]) -> Result<Self, KernelError> {
        let name = dtype.name();
        if !cols.is_multiple_of(dtype.block_len()) {
            return Err(KernelError::RowNotWholeBlocks { dtype: name, block_len: dtype.block_len(), cols });
        }
        let too_large = KernelError::WeightTooLarge { dtype: name, rows, cols };
        let row_bytes = dtype.row_bytes(cols).ok_or(too_large.clone())?;
        let expected = row_bytes.checked_mul(rows).ok_or(too_large)?;
        if data.len() != expected {
            return Err(KernelError::WeightBytes { dtype: name, rows, cols, expected, found: data.len() });
        }
        Ok(Weight { dtype, rows, cols, row_bytes, data })
    }

    /// How the weights are stored.
    pub fn dtype(&self) -> WeightType {
        self.dtype
    }

    /// Number of rows: outputs of the product.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns: inputs of the product.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// All bytes, row after row.
    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    /// The bytes of `count` rows from `first` on. Panics if the matrix does not have them.
    pub(crate) fn row_data(&self, first: usize, count: usize) -> &'a [u8] {
        assert!(first <= self.rows && count <= self.rows - first, "rows {first}+{count} of {}", self.rows);
        &self.data[first * self.row_bytes..(first + count) * self.row_bytes]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_is_exactly_as_long_as_its_shape() {
        for dtype in WeightType::ALL {
            let cols = 2 * dtype.block_len();
            let row_bytes = 2 * dtype.block_bytes();
            assert_eq!(dtype.row_bytes(cols), Some(row_bytes));
            let data = vec![0u8; 3 * row_bytes + 1];
            let weight = Weight::new(dtype, 3, cols, &data[..3 * row_bytes]).unwrap();
            assert_eq!((weight.rows(), weight.cols(), weight.row_bytes()), (3, cols, row_bytes));
            let error = Weight::new(dtype, 3, cols, &data).unwrap_err();
            let (expected, found) = (3 * row_bytes, 3 * row_bytes + 1);
            assert_eq!(error, KernelError::WeightBytes { dtype: dtype.name(), rows: 3, cols, expected, found });
        }
    }

    #[test]
    fn shapes_that_cannot_be_are_errors() {
        let error = Weight::new(WeightType::Q8_0, 1, 33, &[]).unwrap_err();
        assert_eq!(error, KernelError::RowNotWholeBlocks { dtype: "Q8_0", block_len: 32, cols: 33 });
        let error = Weight::new(WeightType::F32, usize::MAX, 2, &[]).unwrap_err();
        assert_eq!(error, KernelError::WeightTooLarge { dtype: "F32", rows: usize::MAX, cols: 2 });
        let error = Weight::new(WeightType::F32, 1, usize::MAX, &[]).unwrap_err();
        assert_eq!(error, KernelError::WeightTooLarge { dtype: "F32", rows: 1, cols: usize::MAX });
    }
}
