//! Metadata values. Strings and arrays borrow the file's mapped header.

use super::cursor::{At, Cursor};
use super::error::{GgufError, Label};

/// Arrays in arrays in arrays are refused: no known model has them, and recursion stays bounded.
pub const ARRAY_DEPTH_MAX: u32 = 2;

/// The type of a metadata value or of an array's elements. The number is GGUF's id.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum ValueType {
    /// 8 bits, unsigned.
    U8 = 0,
    /// 8 bits, signed.
    I8 = 1,
    /// 16 bits, unsigned.
    U16 = 2,
    /// 16 bits, signed.
    I16 = 3,
    /// 32 bits, unsigned.
    U32 = 4,
    /// 32 bits, signed.
    I32 = 5,
    /// IEEE single.
    F32 = 6,
    /// One byte, 0 or 1.
    Bool = 7,
    /// Length and bytes; usually UTF-8, but nobody promises it.
    Str = 8,
    /// Element type, count, elements.
    Array = 9,
    /// 64 bits, unsigned.
    U64 = 10,
    /// 64 bits, signed.
    I64 = 11,
    /// IEEE double.
    F64 = 12,
}

impl ValueType {
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::Str,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    /// The type with this id.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.get(id as usize).copied()
    }

    /// Its name, as GGUF's description has it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::U8 => "uint8",
            Self::I8 => "int8",
            Self::U16 => "uint16",
            Self::I16 => "int16",
            Self::U32 => "uint32",
            Self::I32 => "int32",
            Self::F32 => "float32",
            Self::Bool => "bool",
            Self::Str => "string",
            Self::Array => "array",
            Self::U64 => "uint64",
            Self::I64 => "int64",
            Self::F64 => "float64",
        }
    }

    /// Bytes of a value; `None` for strings and arrays.
    const fn fixed_bytes(self) -> Option<u64> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::Str | Self::Array => None,
        }
    }

    /// The least a value can take: an empty string is its length, an empty array type and count.
    const fn least_bytes(self) -> u64 {
        match self {
            Self::Str => 8,
            Self::Array => 12,
            _ => match self.fixed_bytes() {
                Some(bytes) => bytes,
                None => unreachable!(),
            },
        }
    }
}

/// A metadata value.
#[derive(Clone, Copy, Debug)]
pub enum Value<'a> {
    /// 8 bits, unsigned.
    U8(u8),
    /// 8 bits, signed.
    I8(i8),
    /// 16 bits, unsigned.
    U16(u16),
    /// 16 bits, signed.
    I16(i16),
    /// 32 bits, unsigned.
    U32(u32),
    /// 32 bits, signed.
    I32(i32),
    /// 64 bits, unsigned.
    U64(u64),
    /// 64 bits, signed.
    I64(i64),
    /// IEEE single.
    F32(f32),
    /// IEEE double.
    F64(f64),
    /// True or false.
    Bool(bool),
    /// Bytes that are usually, not surely, UTF-8.
    Str(&'a [u8]),
    /// Values of one type.
    Array(Array<'a>),
}

impl<'a> Value<'a> {
    /// Its type.
    pub const fn ty(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F32(_) => ValueType::F32,
            Self::F64(_) => ValueType::F64,
            Self::Bool(_) => ValueType::Bool,
            Self::Str(_) => ValueType::Str,
            Self::Array(_) => ValueType::Array,
        }
    }

    /// Any integer that isn't negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(v) => Some(v.into()),
            Self::U16(v) => Some(v.into()),
            Self::U32(v) => Some(v.into()),
            Self::U64(v) => Some(v),
            Self::I8(v) => v.try_into().ok(),
            Self::I16(v) => v.try_into().ok(),
            Self::I32(v) => v.try_into().ok(),
            Self::I64(v) => v.try_into().ok(),
            _ => None,
        }
    }

    /// Any integer in range, whatever width it was written with.
    pub fn as_u32(&self) -> Option<u32> {
        self.as_u64()?.try_into().ok()
    }

    /// Any integer in range, whatever width it was written with.
    pub fn as_i64(&self) -> Option<i64> {
        match *self {
            Self::I8(v) => Some(v.into()),
            Self::I16(v) => Some(v.into()),
            Self::I32(v) => Some(v.into()),
            Self::I64(v) => Some(v),
            _ => self.as_u64()?.try_into().ok(),
        }
    }

    /// A float; a double is rounded.
    pub fn as_f32(&self) -> Option<f32> {
        match *self {
            Self::F32(v) => Some(v),
            Self::F64(v) => Some(v as f32),
            _ => None,
        }
    }

    /// A bool.
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Self::Bool(v) => Some(v),
            _ => None,
        }
    }

    /// A string's bytes.
    pub fn as_bytes(&self) -> Option<&'a [u8]> {
        match *self {
            Self::Str(v) => Some(v),
            _ => None,
        }
    }

    /// A string that is UTF-8.
    pub fn as_str(&self) -> Option<&'a str> {
        core::str::from_utf8(self.as_bytes()?).ok()
    }

    /// An array.
    pub fn as_array(&self) -> Option<Array<'a>> {
        match *self {
            Self::Array(v) => Some(v),
            _ => None,
        }
    }
}

/// An array in the metadata. Copying it copies no elements.
#[derive(Clone, Copy, Debug)]
pub struct Array<'a> {
    elements: ValueType,
    len: usize,
    /// From the first element on. Exact for elements of fixed size; else it runs to the end of
    /// what was mapped, since only a walk would tell.
    bytes: &'a [u8],
    /// Where `bytes` begins in the file.
    offset: u64,
}

impl<'a> Array<'a> {
    /// Type of the elements.
    pub fn element_type(&self) -> ValueType {
        self.elements
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True without elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the first element begins in the file.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Element `i`, at once; `None` past the end and for strings and arrays (walk those).
    pub fn get(&self, i: usize) -> Option<Value<'a>> {
        let size = self.elements.fixed_bytes()? as usize;
        let bytes = self.bytes.get(i.checked_mul(size)?..)?.get(..size)?;
        let mut cursor = Cursor::new(bytes, 0, size as u64);
        read(&mut cursor, self.elements).ok()
    }

    /// Every element.
    pub fn values(&self) -> Values<'a> {
        let cursor = Cursor::new(self.bytes, 0, self.bytes.len() as u64);
        Values {
            cursor,
            offset: self.offset,
            elements: self.elements,
            left: self.len,
        }
    }

    /// The strings of an array of strings; `None` for any other.
    pub fn strings(&self) -> Option<Strings<'a>> {
        (self.elements == ValueType::Str).then_some(Strings {
            bytes: self.bytes,
            offset: self.offset,
            left: self.len,
        })
    }

    /// The numbers of an array of `float32`; `None` for any other.
    pub fn f32s(&self) -> Option<impl ExactSizeIterator<Item = f32> + Clone + use<'a>> {
        let numbers = self.fixed::<4>(ValueType::F32)?;
        Some(numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)))
    }

    /// The numbers of an array of `int32`; `None` for any other.
    pub fn i32s(&self) -> Option<impl ExactSizeIterator<Item = i32> + Clone + use<'a>> {
        let numbers = self.fixed::<4>(ValueType::I32)?;
        Some(numbers.iter().map(|bytes| i32::from_le_bytes(*bytes)))
    }

    /// The numbers of an array of `uint32`; `None` for any other.
    pub fn u32s(&self) -> Option<impl ExactSizeIterator<Item = u32> + Clone + use<'a>> {
        let numbers = self.fixed::<4>(ValueType::U32)?;
        Some(numbers.iter().map(|bytes| u32::from_le_bytes(*bytes)))
    }

    fn fixed<const N: usize>(&self, ty: ValueType) -> Option<&'a [[u8; N]]> {
        (self.elements == ty).then_some(self.bytes.as_chunks::<N>().0)
    }
}

/// Walks an array. See [`Array::values`].
#[derive(Clone, Debug)]
pub struct Values<'a> {
    cursor: Cursor<'a>,
    /// Where the cursor's position 0 is in the file.
    offset: u64,
    elements: ValueType,
    left: usize,
}

impl<'a> Iterator for Values<'a> {
    type Item = Value<'a>;

    fn next(&mut self) -> Option<Value<'a>> {
        self.left = self.left.checked_sub(1)?;
        let mut value = read(&mut self.cursor, self.elements).ok()?;
        if let Value::Array(array) = &mut value {
            array.offset += self.offset;
            array.pass(&mut self.cursor).ok()?;
        }
        Some(value)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Values<'_> {}

/// Walks an array of strings. See [`Array::strings`].
#[derive(Clone, Debug)]
pub struct Strings<'a> {
    bytes: &'a [u8],
    /// Where `bytes` begins in the file.
    offset: u64,
    left: usize,
}

impl<'a> Strings<'a> {
    /// Each string with the offset of its first byte in the file: keep offsets and lengths and you
    /// have random access without copying a string.
    pub fn with_offsets(mut self) -> impl Iterator<Item = (u64, &'a [u8])> + Clone {
        (0..self.left).map_while(move |_| {
            let string = self.next()?;
            Some((self.offset - string.len() as u64, string))
        })
    }
}

impl<'a> Iterator for Strings<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        self.left = self.left.checked_sub(1)?;
        let (len, rest) = self.bytes.split_first_chunk::<8>()?;
        let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
        let (string, rest) = rest.split_at_checked(len)?;
        self.bytes = rest;
        self.offset += 8 + len as u64;
        Some(string)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Strings<'_> {}

/// Reads a value's type and the value. Of an array, only the head: the cursor stands at its first
/// element, and [`pass`] goes on from there.
pub(super) fn read_any<'a>(cursor: &mut Cursor<'a>) -> Result<Value<'a>, GgufError> {
    let ty = read_type(cursor)?;
    read(cursor, ty)
}

/// Walks over an array's elements and checks them.
pub(super) fn pass(
    cursor: &mut Cursor<'_>,
    elements: ValueType,
    len: usize,
    depth: u32,
) -> Result<(), GgufError> {
    match elements {
        ValueType::Str => {
            for _ in 0..len {
                cursor.string()?;
            }
        }
        ValueType::Array => {
            if depth == ARRAY_DEPTH_MAX {
                return Err(GgufError::Nesting {
                    key: key_of(cursor),
                });
            }
            for _ in 0..len {
                let (elements, len) = read_array_head(cursor)?;
                pass(cursor, elements, len, depth + 1)?;
            }
        }
        _ => {
            // Bounded by `read_array_head`, so it can't overflow.
            let bytes = cursor.take(len as u64 * elements.least_bytes())?;
            if elements == ValueType::Bool
                && let Some(&value) = bytes.iter().find(|&&byte| byte > 1)
            {
                return Err(GgufError::Bool {
                    key: key_of(cursor),
                    value,
                });
            }
        }
    }
    Ok(())
}

impl<'a> Array<'a> {
    /// Walks over the elements from `cursor`, which stands at the first one.
    pub(super) fn pass(&self, cursor: &mut Cursor<'a>) -> Result<(), GgufError> {
        pass(cursor, self.elements, self.len, 1)
    }
}

fn read<'a>(cursor: &mut Cursor<'a>, ty: ValueType) -> Result<Value<'a>, GgufError> {
    Ok(match ty {
        ValueType::U8 => Value::U8(cursor.array::<1>()?[0]),
        ValueType::I8 => Value::I8(i8::from_le_bytes(cursor.array()?)),
        ValueType::U16 => Value::U16(u16::from_le_bytes(cursor.array()?)),
        ValueType::I16 => Value::I16(i16::from_le_bytes(cursor.array()?)),
        ValueType::U32 => Value::U32(cursor.u32()?),
        ValueType::I32 => Value::I32(i32::from_le_bytes(cursor.array()?)),
        ValueType::U64 => Value::U64(cursor.u64()?),
        ValueType::I64 => Value::I64(i64::from_le_bytes(cursor.array()?)),
        ValueType::F32 => Value::F32(f32::from_le_bytes(cursor.array()?)),
        ValueType::F64 => Value::F64(f64::from_le_bytes(cursor.array()?)),
        ValueType::Bool => match cursor.array::<1>()?[0] {
            0 => Value::Bool(false),
            1 => Value::Bool(true),
            value => {
                return Err(GgufError::Bool {
                    key: key_of(cursor),
                    value,
                });
            }
        },
        ValueType::Str => Value::Str(cursor.string()?),
        ValueType::Array => {
            let (elements, len) = read_array_head(cursor)?;
            let offset = cursor.pos() as u64;
            let bytes = match elements.fixed_bytes() {
                Some(size) => cursor.clone().take(len as u64 * size)?,
                None => cursor.rest(),
            };
            Value::Array(Array {
                elements,
                len,
                bytes,
                offset,
            })
        }
    })
}

fn read_array_head(cursor: &mut Cursor<'_>) -> Result<(ValueType, usize), GgufError> {
    let elements = read_type(cursor)?;
    let len = cursor.count(elements.least_bytes())?;
    match usize::try_from(len) {
        Ok(len) => Ok((elements, len)),
        // A 32-bit machine can't map as many elements as this file has room for.
        Err(_) => Err(GgufError::Count {
            place: cursor.at.place(),
            count: len,
            left: cursor.left(),
        }),
    }
}

fn read_type(cursor: &mut Cursor<'_>) -> Result<ValueType, GgufError> {
    let id = cursor.u32()?;
    ValueType::from_id(id).ok_or_else(|| GgufError::ValueType {
        key: key_of(cursor),
        id,
    })
}

fn key_of(cursor: &Cursor<'_>) -> Label {
    match cursor.at {
        At::Value(key) => Label::new(key),
        _ => Label::new(""),
    }
}
