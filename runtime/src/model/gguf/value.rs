//! Metadata values, decoded where they lie.

/// The type of a metadata value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the format's own names")]
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    pub(super) fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            8 => Self::String,
            9 => Self::Array,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            _ => return None,
        })
    }

    /// Bytes of a value of fixed width; `None` for strings and arrays.
    pub(super) fn width(self) -> Option<u64> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::String | Self::Array => None,
        }
    }
}

/// A metadata value, borrowed from the map.
#[derive(Debug, Clone, Copy)]
pub enum Value<'a> {
    /// Any unsigned integer.
    Unsigned(u64),
    /// Any signed integer.
    Signed(i64),
    /// Either float.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A string; its bytes need not be UTF-8.
    String(&'a [u8]),
    /// An array.
    Array(Array<'a>),
}

/// An array of the metadata, decoded as it is iterated.
#[derive(Debug, Clone, Copy)]
pub struct Array<'a> {
    /// The type of the elements.
    pub element: ValueType,
    /// How many there are; checked against the file.
    pub count: usize,
    pub(super) bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// The elements in order. Elements of nested arrays are skipped, not decoded.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let mut rest = self.bytes;
        let element = self.element;
        (0..self.count).map_while(move |_| take_value(&mut rest, element))
    }
}

/// Decodes one value of a region that the parser has already walked over; `None` would mean that it had not.
pub(super) fn take_value<'a>(rest: &mut &'a [u8], dtype: ValueType) -> Option<Value<'a>> {
    fn take<'a>(rest: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
        let (head, tail) = rest.split_at_checked(count)?;
        *rest = tail;
        Some(head)
    }
    macro_rules! number {
        ($t:ty) => {
            <$t>::from_le_bytes(take(rest, size_of::<$t>())?.try_into().ok()?)
        };
    }
    Some(match dtype {
        ValueType::U8 => Value::Unsigned(number!(u8).into()),
        ValueType::I8 => Value::Signed(number!(i8).into()),
        ValueType::U16 => Value::Unsigned(number!(u16).into()),
        ValueType::I16 => Value::Signed(number!(i16).into()),
        ValueType::U32 => Value::Unsigned(number!(u32).into()),
        ValueType::I32 => Value::Signed(number!(i32).into()),
        ValueType::F32 => Value::Float(number!(f32).into()),
        ValueType::Bool => Value::Bool(number!(u8) != 0),
        ValueType::U64 => Value::Unsigned(number!(u64)),
        ValueType::I64 => Value::Signed(number!(i64)),
        ValueType::F64 => Value::Float(number!(f64)),
        ValueType::String => {
            let length = usize::try_from(number!(u64)).ok()?;
            Value::String(take(rest, length)?)
        }
        ValueType::Array => {
            let element = ValueType::from_code(number!(u32))?;
            let count = usize::try_from(number!(u64)).ok()?;
            let start = *rest;
            for _ in 0..count {
                take_value(rest, element)?;
            }
            Value::Array(Array { element, count, bytes: &start[..start.len() - rest.len()] })
        }
    })
}

/// What a value is, for an error message.
pub(super) fn describe(value: Value<'_>) -> String {
    match value {
        Value::Unsigned(value) => format!("the integer {value}"),
        Value::Signed(value) => format!("the integer {value}"),
        Value::Float(value) => format!("the number {value}"),
        Value::Bool(value) => format!("{value}"),
        Value::String(_) => "a string".to_string(),
        Value::Array(array) => format!("an array of {} values of type {:?}", array.count, array.element),
    }
}
