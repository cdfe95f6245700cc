//! Any bytes as a packed model: refused, or every place that it names lies inside the file.

#![no_main]

use leanstream_core::gguf::{Gguf, TensorIndex};
use leanstream_core::pack::{CRC_BYTES, Pack, PackError, Place, check_order};
use leanstream_core::plan::{self, Model};
use libfuzzer_sys::fuzz_target;

/// Layers that are looked at: more would only fuzz slower.
const LAYERS_MAX: u32 = 8;

fuzz_target!(|data: &[u8]| {
    let Ok(gguf) = Gguf::parse(data, data.len() as u64) else {
        return;
    };
    let files = [gguf];
    let mut scratch = vec![0; TensorIndex::entries_needed(&files)];
    let Ok(tensors) = TensorIndex::new(&files, &mut scratch) else {
        return;
    };
    let model = Model {
        first: &files[0],
        tensors,
    };
    let Ok(hyper) = plan::hyper(&model) else {
        return;
    };
    match Pack::of(&model, &hyper) {
        Ok(Some(pack)) => read_everything(&pack, data),
        Ok(None) => {}
        Err(error) => told(error),
    }
});

fn told(error: PackError) {
    assert!(!error.to_string().contains('\n'));
}

fn read_everything(pack: &Pack<'_, '_>, data: &[u8]) {
    // Slicing is the check that it lies inside the file.
    let bytes = |place: Place| &data[place.offset as usize..][..place.bytes as usize];
    for number in 0..pack.layers().min(LAYERS_MAX) {
        let layer = match pack.layer(number) {
            Ok(layer) => layer,
            Err(error) => {
                told(error);
                continue;
            }
        };
        let layout = layer.layout;
        let count = layer.count as usize;
        assert_eq!(bytes(layer.units).len(), count * layer.unit_bytes as usize);
        assert_eq!(layout.crc_at + CRC_BYTES, layer.unit_bytes);
        let part = |row: Option<(_, u32)>| row.map_or(0, |(_, bytes)| bytes);
        assert_eq!(part(layout.gate), layout.up_at);
        assert_eq!(layout.up_at + part(layout.up), layout.down_at);
        assert_eq!(layer.sketch.is_some(), layout.gate.is_some());
        if let Some(sketch) = layer.sketch {
            assert_eq!(
                bytes(sketch.rows).len(),
                count * sketch.row_bytes as usize
            );
            assert_eq!(bytes(sketch.crcs).len(), 4 * count);
        }
        assert!(layout.down_at + layout.down_bytes <= layout.crc_at);
        assert!(layer.unit_bytes.is_multiple_of(4));
        assert_eq!(layer.scales.is_some(), layer.down.has_scales());
        assert_eq!(layer.mins.is_some(), layer.down.has_mins());
        if let Some(scales) = layer.scales {
            let mins = layer
                .mins
                .map_or(scales.bytes, |mins| bytes(mins).len() as u64);
            assert_eq!(bytes(scales).len() as u64, mins);
        }
        assert_eq!(bytes(layer.stats).len(), 12 * count);
        let order = bytes(layer.order).as_chunks::<4>().0;
        let mut seen = vec![0; count.div_ceil(8)];
        let order = order.iter().map(|neuron| i32::from_le_bytes(*neuron));
        if let Err(error) = check_order(number, order, &mut seen) {
            told(error);
        }
    }
    match pack.head() {
        Ok(Some(head)) => {
            let count = head.count as usize;
            assert_eq!(bytes(head.units).len(), count * head.unit_bytes as usize);
            assert_eq!(
                bytes(head.sketch).len(),
                count * head.sketch_row_bytes as usize
            );
            assert_eq!(bytes(head.sketch_error).len(), 4 * count);
            assert!(head.row.1 <= head.crc_at);
            assert_eq!(head.crc_at + CRC_BYTES, head.unit_bytes);
        }
        Ok(None) => {}
        Err(error) => told(error),
    }
}
