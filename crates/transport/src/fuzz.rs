//! Fuzz target bodies for websocket frames and JSON Web Tokens.
//!
//! Each function takes arbitrary bytes and panics if the decoder breaks a guarantee. `fuzz/` runs
//! them under a fuzzer; ordinary tests run them over the committed seeds.

use exec_server_protocol::limits::{MAX_FRAME_BYTES, MAX_MESSAGE_BYTES};

use serde_json::Value;

use crate::Secret;
use crate::frame::{
    DecodeStep, Decoder, Opcode, WebsocketError, WebsocketRole, push_frame, push_message,
};
use crate::jwt;

/// Decodes a byte stream whole and in pieces; the first two bytes choose the role and the piece
/// sizes.
///
/// # Panics
///
/// If the piece sizes change what is received, a size limit is exceeded, or a message differs after
/// it is sent again.
pub fn frames(data: &[u8]) {
    let [role, pieces, wire @ ..] = data else {
        return;
    };
    let role = if role & 1 == 0 {
        WebsocketRole::Server
    } else {
        WebsocketRole::Client
    };
    let whole = receive(role, wire, |_| usize::MAX);
    assert_eq!(receive(role, wire, |_| 1), whole);
    let size = usize::from(*pieces);
    assert_eq!(receive(role, wire, |n| 1 + (size + 7 * n) % 64), whole);

    let mut sent = Vec::new();
    for event in &whole.0 {
        let mask = (role == WebsocketRole::Server).then_some([*pieces, 1, 0, 255]);
        match event {
            FuzzEvent::Control(opcode, payload) => push_frame(&mut sent, *opcode, mask, payload),
            FuzzEvent::Binary(payload) => push_frame(&mut sent, Opcode::Binary, mask, payload),
            FuzzEvent::Text(payload) => {
                push_message(&mut sent, mask, size, |out| out.extend_from_slice(payload));
            }
        }
    }
    assert_eq!(receive(role, &sent, |_| usize::MAX), (whole.0, None));
}

#[derive(Debug, PartialEq)]
enum FuzzEvent {
    Control(Opcode, Vec<u8>),
    Binary(Vec<u8>),
    Text(Vec<u8>),
}

/// Returns the messages that a link receives if its `n`th read returns `size(n)` bytes, and the
/// result that ends the link.
fn receive(
    role: WebsocketRole,
    mut wire: &[u8],
    size: impl Fn(usize) -> usize,
) -> (Vec<FuzzEvent>, Option<WebsocketError>) {
    let mut decoder = Decoder::new(role);
    let (mut buffer, mut at, mut received) = (Vec::new(), 0, Vec::new());
    // Length that the buffer must reach before the decoder can make progress.
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
            if let DecodeStep::NeedMore(more) = step {
                assert_ne!(more, 0, "waiting for nothing");
                needed = buffer.len() + more;
                break;
            }
            assert!(buffer.len() >= needed, "it had asked for too much");
            match step {
                DecodeStep::NeedMore(_) | DecodeStep::Fragment => {}
                DecodeStep::Control(opcode, payload) => {
                    assert_eq!(payload.end, at);
                    assert!(payload.len() <= 125);
                    received.push(FuzzEvent::Control(opcode, buffer[payload].to_vec()));
                }
                DecodeStep::Whole { text, payload } => {
                    assert_eq!(payload.end, at);
                    assert!(payload.len() <= MAX_FRAME_BYTES);
                    received.push(message(text, &buffer[payload]));
                }
                DecodeStep::Assembled { text } => {
                    assert!(decoder.assembled().len() <= MAX_MESSAGE_BYTES);
                    received.push(message(text, decoder.assembled()));
                }
            }
        }
        // Remove the consumed bytes, as a link does.
        buffer.drain(..at);
        needed -= at;
        at = 0;
    }
    (received, None)
}

fn message(text: bool, payload: &[u8]) -> FuzzEvent {
    if text {
        FuzzEvent::Text(payload.to_vec())
    } else {
        FuzzEvent::Binary(payload.to_vec())
    }
}

/// Parses a token; then signs a header and claims, separated by a line break, and verifies the
/// result. The first byte chooses a character of the signed token to change.
///
/// # Panics
///
/// If an unsigned token verifies, a claim with the wrong type or value is accepted, or a changed
/// token is accepted.
pub fn jwt(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else {
        return;
    };
    let secret = Secret::from("0123456789abcdef0123456789abcdef");
    let keys = [jwt::VerificationKey::hmac(&secret)];
    let read = |text: &str| {
        let token = jwt::ParsedToken::parse(text, &[jwt::SignatureAlgorithm::Hs256])?;
        token.verify(&keys)
    };
    assert!(read(text).is_err(), "an unsigned token is accepted");
    let _ = jwt::inspect(&Secret::from(text));

    let mut characters = text.chars();
    let position = characters.next().map_or(0, |first| first as usize);
    let (header, claims) = match characters.as_str().split_once('\n') {
        Some(both) => both,
        None => (r#"{"alg":"HS256"}"#, characters.as_str()),
    };
    let token = jwt::sign_text(header, claims, &secret);
    let token = token.expose();
    if let Ok(found) = read(token) {
        let header: Value = serde_json::from_str(header).expect("an accepted header is JSON");
        assert_eq!(header["alg"], "HS256");
        assert_eq!(header.get("crit"), None);
        let tree: Value = serde_json::from_str(claims).expect("accepted claims are JSON");
        assert_eq!(tree.as_object(), Some(found.members()));
        assert_eq!(tree["exp"].as_i64(), Some(found.expires()));
        assert_eq!(
            tree.get("sub").map(Value::as_str),
            found.subject().map(Some)
        );
        assert!(
            found
                .subject()
                .is_none_or(|it| it.len() <= jwt::MAX_SUBJECT_BYTES)
        );
        for name in ["nbf", "iat"] {
            assert!(tree.get(name).is_none_or(Value::is_i64), "{name}");
        }
        for name in ["iss", "sub"] {
            assert!(tree.get(name).is_none_or(Value::is_string), "{name}");
        }
    }
    let position = position % token.len();
    let other = if token.as_bytes()[position] == b'A' {
        "B"
    } else {
        "A"
    };
    let changed = format!("{}{other}{}", &token[..position], &token[position + 1..]);
    assert!(read(&changed).is_err(), "a changed token is accepted");
}

#[cfg(test)]
mod tests {
    use exec_server_protocol::fuzz::replay;

    use super::{frames, jwt};

    #[test]
    fn frame_decoder_keeps_its_guarantees_on_all_seeds() {
        replay("frames", frames);
    }

    #[test]
    fn token_decoder_keeps_its_guarantees_on_all_seeds() {
        replay("jwt", jwt);
    }
}
