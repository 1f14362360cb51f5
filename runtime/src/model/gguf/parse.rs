//! The head of a GGUF file: header, metadata, tensor directory.

use std::collections::HashMap;
use std::ops::Range;

use forebay_kernels::WeightType;

use super::error::GgufError;
use super::value::{Value, ValueType, take_value};

/// A model of 1,000 layers with 20 tensors each has 20,000; above this a count is damage, not a model.
const TENSOR_COUNT_MAX: u64 = 1 << 17;
/// Published files have 20 to 60 pairs.
const METADATA_COUNT_MAX: u64 = 1 << 16;
/// Bytes of a metadata key (the format's own limit).
const KEY_BYTES_MAX: u64 = 65_535;
/// Bytes of a tensor name (the format allows 64; some writers go beyond).
pub(super) const NAME_BYTES_MAX: u64 = 256;
/// Arrays of arrays of arrays are nowhere in use; the bound keeps recursion finite.
const ARRAY_DEPTH_MAX: usize = 4;
/// The format's limit.
pub(super) const DIMENSIONS_MAX: u32 = 4;
/// The format's default for `general.alignment`.
const ALIGNMENT_DEFAULT: u64 = 32;
/// An alignment above this is damage.
pub(super) const ALIGNMENT_MAX: u64 = 1 << 24;
/// The shortest possible metadata pair: key length, type, one byte.
const METADATA_PAIR_BYTES_MIN: u64 = 8 + 4 + 1;
/// The shortest possible directory entry: name length, dimension count, one dimension, type, offset.
const TENSOR_ENTRY_BYTES_MIN: u64 = 8 + 4 + 8 + 4 + 8;

/// The number that a storage type has in the file.
const TYPE_CODES: [(u32, WeightType); 11] = [
    (0, WeightType::F32),
    (1, WeightType::F16),
    (2, WeightType::Q4_0),
    (3, WeightType::Q4_1),
    (6, WeightType::Q5_0),
    (7, WeightType::Q5_1),
    (8, WeightType::Q8_0),
    (12, WeightType::Q4K),
    (13, WeightType::Q5K),
    (14, WeightType::Q6K),
    (30, WeightType::BF16),
];

/// The number that stands for a storage type in a GGUF file.
pub fn type_code(dtype: WeightType) -> u32 {
    TYPE_CODES.iter().find(|(_, known)| *known == dtype).map_or(u32::MAX, |(code, _)| *code)
}

/// Names of ggml types that are known but not supported, so that an error can say what was found.
fn type_name(code: u32) -> String {
    const OTHERS: &[(u32, &str)] = &[
        (9, "Q8_1"),
        (10, "Q2_K"),
        (11, "Q3_K"),
        (15, "Q8_K"),
        (16, "IQ2_XXS"),
        (17, "IQ2_XS"),
        (18, "IQ3_XXS"),
        (19, "IQ1_S"),
        (20, "IQ4_NL"),
        (21, "IQ3_S"),
        (22, "IQ2_S"),
        (23, "IQ4_XS"),
        (24, "I8"),
        (25, "I16"),
        (26, "I32"),
        (27, "I64"),
        (28, "F64"),
        (29, "IQ1_M"),
        (34, "TQ1_0"),
        (35, "TQ2_0"),
        (39, "MXFP4"),
    ];
    match OTHERS.iter().find(|(known, _)| *known == code) {
        Some((_, name)) => (*name).to_string(),
        None => format!("number {code}, which nobody has defined"),
    }
}

/// One entry of the tensor directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name, as in `blk.0.attn_q.weight`.
    pub name: String,
    /// Dimensions, the fastest-moving first: a matrix `[rows][cols]` stands here as `[cols, rows]`.
    pub dims: Vec<u64>,
    /// The storage type.
    pub dtype: WeightType,
    /// Offset from the start of the data section, as in the file.
    pub offset: u64,
    pub(super) bytes: Range<usize>,
}

impl TensorInfo {
    /// Bytes of the tensor's data.
    pub fn byte_count(&self) -> usize {
        self.bytes.len()
    }
}

/// Where a metadata value lies in the file.
#[derive(Debug, Clone)]
pub(super) struct Slot {
    pub(super) dtype: ValueType,
    /// For an array: its element type and count; `bytes` is then the elements.
    pub(super) array: Option<(ValueType, u64)>,
    pub(super) bytes: Range<usize>,
}

/// The parsed head of a GGUF file: metadata and tensor directory, without the bytes themselves.
#[derive(Debug)]
pub(super) struct Directory {
    pub(super) version: u32,
    pub(super) metadata: HashMap<String, Slot>,
    pub(super) tensors: Vec<TensorInfo>,
    pub(super) index: HashMap<String, usize>,
}

/// Walks the file from the start; every read is checked against its end.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    fn take(&mut self, count: u64, what: &'static str) -> Result<&'a [u8], GgufError> {
        if count > self.left() {
            return Err(GgufError::Truncated { what, offset: self.at as u64, needed: count, available: self.left() });
        }
        let start = self.at;
        self.at += count as usize;
        Ok(&self.bytes[start..self.at])
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, GgufError> {
        let bytes = self.take(4, what)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, GgufError> {
        let low = self.u32(what)?;
        let high = self.u32(what)?;
        Ok(u64::from(low) | u64::from(high) << 32)
    }

    fn text(&mut self, limit: u64, what: &'static str) -> Result<&'a str, GgufError> {
        let offset = self.at as u64;
        let length = self.u64(what)?;
        if length > limit {
            return Err(GgufError::Count { what, found: length, limit });
        }
        std::str::from_utf8(self.take(length, what)?).map_err(|_| GgufError::Utf8 { what, offset })
    }

    /// Moves past one value and says where it lies.
    fn value(&mut self, key: &str, dtype: ValueType, depth: usize) -> Result<Slot, GgufError> {
        if let Some(width) = dtype.width() {
            let start = self.at;
            self.take(width, "metadata value")?;
            return Ok(Slot { dtype, array: None, bytes: start..self.at });
        }
        if dtype == ValueType::String {
            let length = self.u64("metadata string length")?;
            let start = self.at;
            self.take(length, "metadata string")?;
            return Ok(Slot { dtype, array: None, bytes: start..self.at });
        }
        if depth == ARRAY_DEPTH_MAX {
            return Err(GgufError::ArrayDepth { key: key.to_string(), limit: ARRAY_DEPTH_MAX });
        }
        let element = self.value_type(key)?;
        let count = self.u64("metadata array length")?;
        let start = self.at;
        match element.width() {
            Some(width) => {
                let needed = count.saturating_mul(width);
                self.take(needed, "metadata array")?;
            }
            None => {
                // A string takes at least its length field, an array its type and count: more elements than that cannot be there.
                let limit = self.left() / 8;
                if count > limit {
                    return Err(GgufError::Count { what: "length of a metadata array", found: count, limit });
                }
                for _ in 0..count {
                    self.value(key, element, depth + 1)?;
                }
            }
        }
        Ok(Slot { dtype, array: Some((element, count)), bytes: start..self.at })
    }

    fn value_type(&mut self, key: &str) -> Result<ValueType, GgufError> {
        let code = self.u32("metadata value type")?;
        ValueType::from_code(code).ok_or_else(|| GgufError::ValueType { key: key.to_string(), found: code })
    }
}

impl Directory {
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, GgufError> {
        if !bytes.starts_with(b"GGUF") {
            return Err(GgufError::Magic { found: bytes[..bytes.len().min(4)].to_vec() });
        }
        let mut cursor = Cursor { bytes, at: 4 };
        let version = cursor.u32("version")?;
        match version {
            2 | 3 => {}
            found if (1..=3).contains(&found.swap_bytes()) => {
                return Err(GgufError::BigEndian { version: found.swap_bytes() });
            }
            found => return Err(GgufError::Version { found }),
        }
        let tensor_count = cursor.u64("tensor count")?;
        let metadata_count = cursor.u64("metadata count")?;
        for (what, found, bound, entry) in [
            ("tensor count", tensor_count, TENSOR_COUNT_MAX, TENSOR_ENTRY_BYTES_MIN),
            ("metadata count", metadata_count, METADATA_COUNT_MAX, METADATA_PAIR_BYTES_MIN),
        ] {
            let limit = bound.min(cursor.left() / entry);
            if found > limit {
                return Err(GgufError::Count { what, found, limit });
            }
        }

        let mut metadata = HashMap::with_capacity(metadata_count as usize);
        for _ in 0..metadata_count {
            let key = cursor.text(KEY_BYTES_MAX, "metadata key")?;
            let dtype = cursor.value_type(key)?;
            let slot = cursor.value(key, dtype, 0)?;
            if metadata.insert(key.to_string(), slot).is_some() {
                return Err(GgufError::DuplicateKey { key: key.to_string() });
            }
        }
        let alignment = alignment(bytes, &metadata)?;

        let mut tensors = Vec::with_capacity(tensor_count as usize);
        let mut index = HashMap::with_capacity(tensor_count as usize);
        for position in 0..tensor_count as usize {
            let info = tensor_entry(&mut cursor, alignment)?;
            if index.insert(info.name.clone(), position).is_some() {
                return Err(GgufError::DuplicateTensor { name: info.name });
            }
            tensors.push(info);
        }
        let data_start = (cursor.at as u64).next_multiple_of(alignment);
        for tensor in &mut tensors {
            place(tensor, data_start, bytes.len() as u64)?;
        }
        let mut order: Vec<&TensorInfo> = tensors.iter().collect();
        order.sort_by_key(|tensor| tensor.bytes.start);
        for pair in order.windows(2) {
            if pair[0].bytes.end > pair[1].bytes.start {
                return Err(GgufError::Overlap { first: pair[0].name.clone(), second: pair[1].name.clone() });
            }
        }
        Ok(Self { version, metadata, tensors, index })
    }
}

/// `general.alignment`, which every tensor offset is a multiple of.
fn alignment(bytes: &[u8], metadata: &HashMap<String, Slot>) -> Result<u64, GgufError> {
    let Some(slot) = metadata.get("general.alignment") else {
        return Ok(ALIGNMENT_DEFAULT);
    };
    if slot.dtype != ValueType::U32 {
        return Err(GgufError::Alignment { found: format!("of type {:?}", slot.dtype) });
    }
    match take_value(&mut &bytes[slot.bytes.clone()], slot.dtype) {
        Some(Value::Unsigned(found)) if found.is_power_of_two() && (8..=ALIGNMENT_MAX).contains(&found) => Ok(found),
        Some(Value::Unsigned(found)) => Err(GgufError::Alignment { found: found.to_string() }),
        _ => Err(GgufError::Alignment { found: "unreadable".to_string() }),
    }
}

/// Reads one directory entry; its place in the file is set by [`place`].
fn tensor_entry(cursor: &mut Cursor<'_>, alignment: u64) -> Result<TensorInfo, GgufError> {
    let offset = cursor.at as u64;
    let length = cursor.u64("tensor name length")?;
    if length == 0 || length > NAME_BYTES_MAX {
        return Err(GgufError::NameLength { offset, found: length });
    }
    let name = std::str::from_utf8(cursor.take(length, "tensor name")?)
        .map_err(|_| GgufError::Utf8 { what: "tensor name", offset })?
        .to_string();
    let dimension_count = cursor.u32("tensor dimension count")?;
    if dimension_count == 0 || dimension_count > DIMENSIONS_MAX {
        return Err(GgufError::DimensionCount { name, found: dimension_count });
    }
    let mut dims = Vec::with_capacity(dimension_count as usize);
    for _ in 0..dimension_count {
        dims.push(cursor.u64("tensor dimension")?);
    }
    let code = cursor.u32("tensor type")?;
    let Some(&(_, dtype)) = TYPE_CODES.iter().find(|(known, _)| *known == code) else {
        return Err(GgufError::TensorType { name, found: type_name(code) });
    };
    let offset = cursor.u64("tensor offset")?;
    if !offset.is_multiple_of(alignment) {
        return Err(GgufError::Misaligned { name, found: offset, alignment });
    }
    Ok(TensorInfo { name, dims, dtype, offset, bytes: 0..0 })
}

/// Works out a tensor's bytes and checks that the file has them.
fn place(tensor: &mut TensorInfo, data_start: u64, file_bytes: u64) -> Result<(), GgufError> {
    let dimensions =
        |tensor: &TensorInfo| GgufError::Dimensions { name: tensor.name.clone(), found: tensor.dims.clone() };
    let (block_values, block_bytes) = (tensor.dtype.block_len() as u64, tensor.dtype.block_bytes() as u64);
    let row = tensor.dims[0];
    let values = tensor.dims.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim));
    let Some(values) = values.filter(|&values| values > 0) else {
        return Err(dimensions(tensor));
    };
    if !row.is_multiple_of(block_values) {
        let (name, dtype) = (tensor.name.clone(), tensor.dtype.name());
        return Err(GgufError::RowLength { name, found: row, block: block_values, dtype });
    }
    let Some(needed) = (values / block_values).checked_mul(block_bytes) else {
        return Err(dimensions(tensor));
    };
    let offset = data_start.saturating_add(tensor.offset);
    match offset.checked_add(needed) {
        Some(end) if end <= file_bytes => tensor.bytes = offset as usize..end as usize,
        _ => return Err(GgufError::BeyondEnd { name: tensor.name.clone(), offset, needed, file_bytes }),
    }
    Ok(())
}
