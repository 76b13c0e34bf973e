//! The body of the fuzz target for websocket frames.
//!
//! Takes arbitrary bytes and panics when a promise of the decoder is broken; `fuzz/` runs it under a
//! fuzzer, and an ordinary test over the committed seeds.

use exec_server_protocol::limits::{MAX_FRAME_BYTES, MAX_MESSAGE_BYTES};

use crate::frame::{Decoder, FrameError, Opcode, Role, Step, push_frame, push_message};

/// Decodes a byte stream whole and in pieces; the first two bytes choose the role and the pieces.
///
/// # Panics
///
/// When the pieces change what is received, a size limit is exceeded, or a message does not survive
/// being sent again.
pub fn frames(data: &[u8]) {
    let [role, pieces, wire @ ..] = data else {
        return;
    };
    let role = if role & 1 == 0 {
        Role::Server
    } else {
        Role::Client
    };
    let whole = receive(role, wire, |_| usize::MAX);
    assert_eq!(receive(role, wire, |_| 1), whole);
    let size = usize::from(*pieces);
    assert_eq!(receive(role, wire, |n| 1 + (size + 7 * n) % 64), whole);

    let mut sent = Vec::new();
    for event in &whole.0 {
        let mask = (role == Role::Server).then_some([*pieces, 1, 0, 255]);
        match event {
            Received::Control(opcode, payload) => push_frame(&mut sent, *opcode, mask, payload),
            Received::Binary(payload) => push_frame(&mut sent, Opcode::Binary, mask, payload),
            Received::Text(payload) => {
                push_message(&mut sent, mask, size, |out| out.extend_from_slice(payload));
            }
        }
    }
    assert_eq!(receive(role, &sent, |_| usize::MAX), (whole.0, None));
}

#[derive(Debug, PartialEq)]
enum Received {
    Control(Opcode, Vec<u8>),
    Binary(Vec<u8>),
    Text(Vec<u8>),
}

/// What a link would receive if its `n`th read brought `size(n)` bytes, and what ended it.
fn receive(
    role: Role,
    mut wire: &[u8],
    size: impl Fn(usize) -> usize,
) -> (Vec<Received>, Option<FrameError>) {
    let mut decoder = Decoder::new(role);
    let (mut buffer, mut at, mut received) = (Vec::new(), 0, Vec::new());
    // The length that the buffer must reach before anything else can happen.
    let mut needed = 0;
    for n in 0.. {
        let (piece, rest) = wire.split_at(size(n).min(wire.len()));
        if piece.is_empty() {
            break;
        }
        wire = rest;
        buffer.extend_from_slice(piece);
        loop {
            let step = match decoder.step(&mut buffer, &mut at) {
                Ok(step) => step,
                Err(error) => return (received, Some(error)),
            };
            if let Step::NeedMore(more) = step {
                assert_ne!(more, 0, "waiting for nothing");
                needed = buffer.len() + more;
                break;
            }
            assert!(buffer.len() >= needed, "it had asked for too much");
            match step {
                Step::NeedMore(_) | Step::Fragment => {}
                Step::Control(opcode, payload) => {
                    assert_eq!(payload.end, at);
                    assert!(payload.len() <= 125);
                    received.push(Received::Control(opcode, buffer[payload].to_vec()));
                }
                Step::Whole { text, payload } => {
                    assert_eq!(payload.end, at);
                    assert!(payload.len() <= MAX_FRAME_BYTES);
                    received.push(message(text, &buffer[payload]));
                }
                Step::Assembled { text } => {
                    assert!(decoder.assembled().len() <= MAX_MESSAGE_BYTES);
                    received.push(message(text, decoder.assembled()));
                }
            }
        }
        // As a link does: what was consumed makes room.
        buffer.drain(..at);
        needed -= at;
        at = 0;
    }
    (received, None)
}

fn message(text: bool, payload: &[u8]) -> Received {
    if text {
        Received::Text(payload.to_vec())
    } else {
        Received::Binary(payload.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use exec_server_protocol::fuzz::replay;

    use super::frames;

    #[test]
    fn frames_keep_their_promises() {
        replay("frames", frames);
    }
}
