//! Noise channel: `Noise_hybridIK_25519+MLKEM768_AESGCM_SHA256`.
//!
//! Contains key pairs, the two handshake messages and the encryption of records. Frames and streams
//! are handled elsewhere. All randomness comes from an argument.
//!
//! The handshake is from `clatter`. Records are encrypted with `ring`, which is several times
//! faster than the portable implementation in `clatter`; the test vector covers both.

use std::cell::Cell;
use std::fmt;

use clatter::bytearray::ByteArray as _;
use clatter::crypto::cipher::AesGcm;
use clatter::crypto::dh::X25519;
use clatter::crypto::hash::Sha256;
use clatter::crypto::kem::rust_crypto_ml_kem::MlKem768;
use clatter::handshakepattern::noise_hybrid_ik;
use clatter::rand_core::{self, CryptoRng, RngCore};
use clatter::traits::{Dh, Handshaker as _, Kem};
use clatter::{HybridHandshakeCore, HybridHandshakeParams, KeyPair};
use ring::aead;
use zeroize::{Zeroize as _, Zeroizing};

use crate::keys::PublicKey;
use crate::limits::{MAX_HANDSHAKE_BYTES, TAG_BYTES};

type DhPair = KeyPair<<X25519 as Dh>::PubKey, <X25519 as Dh>::PrivateKey>;
type KemPair = KeyPair<<MlKem768 as Kem>::PubKey, <MlKem768 as Kem>::SecretKey>;
type Handshake = HybridHandshakeCore<X25519, MlKem768, MlKem768, AesGcm, Sha256, PredrawnRandom>;

/// Bytes of an identity's seed: an X25519 secret and an ML-KEM seed.
pub const SEED_BYTES: usize = 32 + 64;

/// First part of every prologue.
const PROLOGUE: &str = "codex-exec-server-relay-noise/v1";

/// Payload of the executor's handshake message if the registry rejected the executor's credentials.
/// In every other case the payload is empty.
const EXECUTOR_REJECTED: &[u8] = b"codex-registry-authentication-rejected/v1";

/// Source of randomness: the system's, or a seeded one in a simulation.
///
/// Keys are generated from it; an implementation that cannot provide randomness must not return.
pub trait Entropy {
    /// Fills `out` with unpredictable bytes.
    fn fill(&mut self, out: &mut [u8]);
}

impl<F: FnMut(&mut [u8])> Entropy for F {
    fn fill(&mut self, out: &mut [u8]) {
        self(out);
    }
}

/// Failed handshake: wrong keys, wrong ids, or not a handshake message.
///
/// Contains no detail on purpose: an attacker must not learn which step failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("noise handshake failed")]
pub struct HandshakeError;

/// Failed decryption: the record was changed, or encrypted with another key or sequence number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("record cannot be decrypted")]
pub struct DecryptError;

/// Long-term key pairs of one party.
#[derive(Clone)]
pub struct StaticKeys {
    seed: Zeroizing<[u8; SEED_BYTES]>,
    dh: DhPair,
    kem: KemPair,
    public: PublicKey,
}

impl StaticKeys {
    /// Generates a new identity.
    pub fn generate(entropy: &mut dyn Entropy) -> Self {
        let mut seed = Zeroizing::new([0; SEED_BYTES]);
        entropy.fill(&mut *seed);
        Self::from_seed(&seed)
    }

    /// Creates the identity with this [`StaticKeys::seed`].
    pub fn from_seed(seed: &[u8; SEED_BYTES]) -> Self {
        let (dh, kem) = key_pairs(seed);
        let public = PublicKey::new(dh.public, kem.public.as_slice())
            .expect("an ML-KEM-768 key has the length of one");
        Self {
            seed: Zeroizing::new(*seed),
            dh,
            kem,
            public,
        }
    }

    /// Returns the seed, from which the identity can be restored; as secret as the private keys.
    pub fn seed(&self) -> &[u8; SEED_BYTES] {
        &self.seed
    }

    /// Returns the public keys.
    pub fn public_key(&self) -> &PublicKey {
        &self.public
    }
}

impl fmt::Debug for StaticKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StaticKeys").field(&self.public).finish()
    }
}

fn key_pairs(seed: &[u8; SEED_BYTES]) -> (DhPair, KemPair) {
    let (dh, kem) = seed.split_at(32);
    let dh = X25519::genkey_rng(&mut PredrawnRandom::new(dh)).expect("any 32 bytes are a secret");
    let kem = MlKem768::genkey_rng(&mut PredrawnRandom::new(kem)).expect("any 64 bytes are a seed");
    (dh, kem)
}

/// Returns the Noise prologue: the ids that both ends must agree on.
pub fn prologue(environment_id: &str, registration_id: &str, stream_id: &str) -> Vec<u8> {
    let mut out = Vec::new();
    for part in [PROLOGUE, environment_id, registration_id, stream_id] {
        out.extend_from_slice(&(part.len() as u64).to_be_bytes());
        out.extend_from_slice(part.as_bytes());
    }
    out
}

/// Harness side of a handshake, waiting for the executor's message.
pub struct Initiator(Box<Handshake>);

impl Initiator {
    /// Creates the first message.
    ///
    /// # Errors
    ///
    /// `executor` is not a valid public key.
    pub fn start(
        identity: &StaticKeys,
        executor: &PublicKey,
        prologue: &[u8],
        payload: &[u8],
        entropy: &mut dyn Entropy,
    ) -> Result<(Self, Vec<u8>), HandshakeError> {
        let mut state = handshake(identity, Some(executor), prologue, entropy)?;
        let message = write(&mut state, payload)?;
        Ok((Self(Box::new(state)), message))
    }

    /// Reads the executor's message, which proves that the executor has the expected key.
    ///
    /// # Errors
    ///
    /// The message is not valid.
    pub fn finish(&mut self, message: &[u8]) -> Result<Finished, HandshakeError> {
        // Works on a copy, so that a forged message does not break the handshake with the real
        // executor.
        let mut state = (*self.0).clone();
        match read(&mut state, message)?.as_slice() {
            [] => Ok(Finished::Channel(ChannelKeys::new(state, true)?)),
            EXECUTOR_REJECTED => Ok(Finished::ExecutorRejected),
            _ => Err(HandshakeError),
        }
    }
}

/// Result of the harness's side of a handshake.
#[expect(
    clippy::large_enum_variant,
    reason = "one value per handshake, which is taken apart at once"
)]
#[derive(Debug)]
pub enum Finished {
    /// Both ends have the keys.
    Channel(ChannelKeys),
    /// There is no channel: the registry rejected the executor's credentials.
    ExecutorRejected,
}

/// Executor side of a handshake, after the first message and before the response.
pub struct Responder(Box<Handshake>);

/// Content of the first handshake message.
pub struct HandshakeRequest {
    /// The harness's public key; only its owner can use the channel.
    pub harness: PublicKey,
    /// The encrypted payload: the authorization.
    pub payload: Vec<u8>,
}

impl Responder {
    /// Reads the first message.
    ///
    /// # Errors
    ///
    /// The message was not created for this identity and prologue.
    pub fn read(
        identity: &StaticKeys,
        prologue: &[u8],
        message: &[u8],
        entropy: &mut dyn Entropy,
    ) -> Result<(Self, HandshakeRequest), HandshakeError> {
        let mut state = handshake(identity, None, prologue, entropy)?;
        let payload = read(&mut state, message)?;
        let harness = state.get_remote_static().ok_or(HandshakeError)?;
        let harness =
            PublicKey::new(*harness.dh(), harness.kem().as_slice()).ok_or(HandshakeError)?;
        Ok((Self(Box::new(state)), HandshakeRequest { harness, payload }))
    }

    /// Creates the second message.
    ///
    /// # Errors
    ///
    /// The harness's public key is not valid.
    pub fn reply(mut self) -> Result<(ChannelKeys, Vec<u8>), HandshakeError> {
        let message = write(&mut self.0, &[])?;
        Ok((ChannelKeys::new(*self.0, false)?, message))
    }

    /// Creates the second message of a handshake that opens no channel, because the registry
    /// rejected the executor's credentials.
    ///
    /// # Errors
    ///
    /// The harness's public key is not valid.
    pub fn reply_executor_rejected(mut self) -> Result<Vec<u8>, HandshakeError> {
        write(&mut self.0, EXECUTOR_REJECTED)
    }
}

fn handshake(
    identity: &StaticKeys,
    peer: Option<&PublicKey>,
    prologue: &[u8],
    entropy: &mut dyn Entropy,
) -> Result<Handshake, HandshakeError> {
    let mut drawn = Zeroizing::new([0; SEED_BYTES + PredrawnRandom::CAPACITY]);
    entropy.fill(&mut *drawn);
    let (ephemeral, encapsulation) = drawn.split_at(SEED_BYTES);
    let ephemeral = ephemeral.try_into().map_err(|_| HandshakeError)?;
    handshake_with(identity, peer, prologue, ephemeral, encapsulation)
}

fn handshake_with(
    identity: &StaticKeys,
    peer: Option<&PublicKey>,
    prologue: &[u8],
    ephemeral: &[u8; SEED_BYTES],
    encapsulation: &[u8],
) -> Result<Handshake, HandshakeError> {
    let (e, e_kem) = key_pairs(ephemeral);
    let mut params = HybridHandshakeParams::new(noise_hybrid_ik(), peer.is_none() ^ true)
        .with_prologue(prologue)
        .with_s(identity.dh.clone())
        .with_s_kem(identity.kem.clone())
        .with_e(e)
        .with_e_kem(e_kem);
    if let Some(peer) = peer {
        params = params
            .with_rs(peer.x25519)
            .with_rs_kem(<MlKem768 as Kem>::PubKey::from_slice(peer.mlkem768()));
    }
    PredrawnRandom::hand_over(encapsulation, || Handshake::new(params)).map_err(|_| HandshakeError)
}

fn write(state: &mut Handshake, payload: &[u8]) -> Result<Vec<u8>, HandshakeError> {
    let length = state
        .get_next_message_overhead()
        .map_err(|_| HandshakeError)?
        + payload.len();
    if length > MAX_HANDSHAKE_BYTES {
        return Err(HandshakeError);
    }
    let mut message = vec![0; length];
    let written = state.write_message(payload, &mut message);
    message.truncate(written.map_err(|_| HandshakeError)?);
    Ok(message)
}

fn read(state: &mut Handshake, message: &[u8]) -> Result<Vec<u8>, HandshakeError> {
    if message.len() > MAX_HANDSHAKE_BYTES {
        return Err(HandshakeError);
    }
    let mut payload = vec![0; message.len()];
    let length = state.read_message(message, &mut payload);
    payload.truncate(length.map_err(|_| HandshakeError)?);
    Ok(payload)
}

/// Result of a handshake: one key for each direction.
#[derive(Debug)]
pub struct ChannelKeys {
    /// Encrypts sent records.
    pub sealer: Sealer,
    /// Decrypts received records.
    pub opener: Opener,
    /// Handshake hash: equal at both ends, and unique to this channel.
    pub hash: [u8; 32],
}

impl ChannelKeys {
    fn new(state: Handshake, initiator: bool) -> Result<Self, HandshakeError> {
        let transport = state.finalize().map_err(|_| HandshakeError)?;
        let hash = transport.get_handshake_hash();
        let keys = transport.take();
        let key = |state: clatter::cipherstate::CipherState<AesGcm>| {
            let (mut key, _) = state.take();
            let unbound = aead::UnboundKey::new(&aead::AES_256_GCM, key.as_slice());
            key.zeroize();
            unbound
                .map(aead::LessSafeKey::new)
                .map_err(|_| HandshakeError)
        };
        let from_initiator = key(keys.initiator_to_responder)?;
        let from_responder = key(keys.responder_to_initiator)?;
        let (sealer, opener) = if initiator {
            (from_initiator, from_responder)
        } else {
            (from_responder, from_initiator)
        };
        let mut copy = [0; 32];
        copy.copy_from_slice(hash.as_slice());
        Ok(Self {
            sealer: Sealer {
                key: sealer,
                next: 0,
            },
            opener: Opener(opener),
            hash: copy,
        })
    }
}

fn nonce(seq: u32) -> aead::Nonce {
    let mut nonce = [0; aead::NONCE_LEN];
    nonce[8..].copy_from_slice(&seq.to_be_bytes());
    aead::Nonce::assume_unique_for_key(nonce)
}

/// Encrypts records, each with its own sequence number.
#[derive(Debug)]
pub struct Sealer {
    key: aead::LessSafeKey,
    /// Exceeds `u32` after the last sequence number.
    next: u64,
}

impl Sealer {
    /// Returns the sequence number of the next record, if one is left.
    pub fn next_seq(&self) -> Option<u32> {
        u32::try_from(self.next).ok()
    }

    /// Encrypts `record` in place and appends the tag; returns its sequence number.
    ///
    /// Each sequence number encrypts one record only: a repeated record is sent as the same
    /// ciphertext.
    ///
    /// # Errors
    ///
    /// No sequence number is left.
    pub fn seal(&mut self, record: &mut Vec<u8>) -> Result<u32, SequenceExhausted> {
        let seq = self.next_seq().ok_or(SequenceExhausted)?;
        self.next += 1;
        self.key
            .seal_in_place_append_tag(nonce(seq), aead::Aad::empty(), record)
            .map_err(|_| SequenceExhausted)?;
        Ok(seq)
    }
}

/// No sequence number is left for another record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("all 2^32 numbers for records are used up")]
pub struct SequenceExhausted;

/// Decrypts records.
#[derive(Debug)]
pub struct Opener(aead::LessSafeKey);

impl Opener {
    /// Decrypts `record` in place; returns the length of the plaintext, which is at its start.
    ///
    /// # Errors
    ///
    /// The record is not exactly what the peer encrypted with `seq`.
    pub fn open(&self, seq: u32, record: &mut [u8]) -> Result<usize, DecryptError> {
        if record.len() < TAG_BYTES {
            return Err(DecryptError);
        }
        self.0
            .open_in_place(nonce(seq), aead::Aad::empty(), record)
            .map(|plaintext| plaintext.len())
            .map_err(|_| DecryptError)
    }
}

/// Random bytes drawn in advance for one handshake operation.
///
/// `clatter` creates its random source with `Default`. To pass bytes from an argument,
/// [`PredrawnRandom::hand_over`] puts them into a thread-local variable, from which `default` takes
/// them.
#[derive(Clone)]
struct PredrawnRandom {
    bytes: Zeroizing<[u8; Self::CAPACITY]>,
    /// Unused part of `bytes`.
    left: std::ops::Range<usize>,
}

thread_local! {
    static HANDED_OVER: Cell<Option<PredrawnRandom>> = const { Cell::new(None) };
}

impl PredrawnRandom {
    /// 64 bytes: two encapsulations, or one ML-KEM key pair.
    const CAPACITY: usize = 64;

    fn new(bytes: &[u8]) -> Self {
        let mut copy = Zeroizing::new([0; Self::CAPACITY]);
        copy[..bytes.len()].copy_from_slice(bytes);
        Self {
            bytes: copy,
            left: 0..bytes.len(),
        }
    }

    fn hand_over<T>(bytes: &[u8], make: impl FnOnce() -> T) -> T {
        HANDED_OVER.set(Some(Self::new(bytes)));
        let made = make();
        HANDED_OVER.set(None);
        made
    }
}

impl Default for PredrawnRandom {
    fn default() -> Self {
        // Without handed-over bytes the source is empty: it panics instead of returning weak
        // randomness.
        HANDED_OVER.take().unwrap_or_else(|| Self::new(&[]))
    }
}

impl RngCore for PredrawnRandom {
    fn next_u32(&mut self) -> u32 {
        let mut bytes = [0; 4];
        self.fill_bytes(&mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn next_u64(&mut self) -> u64 {
        let mut bytes = [0; 8];
        self.fill_bytes(&mut bytes);
        u64::from_le_bytes(bytes)
    }

    fn fill_bytes(&mut self, out: &mut [u8]) {
        // Cannot be triggered by a peer: the algorithms draw a fixed number of bytes.
        assert!(
            out.len() <= self.left.len(),
            "the algorithm draws more randomness than was provided"
        );
        let end = self.left.start + out.len();
        out.copy_from_slice(&self.bytes[self.left.start..end]);
        self.left.start = end;
    }

    fn try_fill_bytes(&mut self, out: &mut [u8]) -> Result<(), rand_core::Error> {
        self.fill_bytes(out);
        Ok(())
    }
}

impl CryptoRng for PredrawnRandom {}

#[cfg(test)]
mod tests {
    use exec_server_protocol::text::hex;

    use super::*;

    fn sha256(bytes: &[u8]) -> String {
        hex(ring::digest::digest(&ring::digest::SHA256, bytes).as_ref())
    }

    fn seed(dh: u8, kem: u8) -> [u8; SEED_BYTES] {
        let mut seed = [kem; SEED_BYTES];
        seed[..32].fill(dh);
        seed
    }

    /// Deterministic source, different for each `start`.
    pub(crate) fn entropy(start: u64) -> impl FnMut(&mut [u8]) {
        let mut state = start.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        move |out: &mut [u8]| {
            for byte in out {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                *byte = (state >> 32) as u8;
            }
        }
    }

    fn opened(finished: Result<Finished, HandshakeError>) -> ChannelKeys {
        match finished.unwrap() {
            Finished::Channel(channel) => channel,
            Finished::ExecutorRejected => panic!("the executor was rejected"),
        }
    }

    #[test]
    fn handshake_payload_reports_rejected_credentials_of_the_executor() {
        let mut random = entropy(3);
        let [harness, executor] = [(); 2].map(|()| StaticKeys::generate(&mut random));
        let (initiator, message) =
            Initiator::start(&harness, executor.public_key(), b"p", b"a", &mut random).unwrap();
        let mut respond = || {
            let read = Responder::read(&executor, b"p", &message, &mut random);
            read.unwrap().0
        };
        let rejected = respond().reply_executor_rejected().unwrap();
        assert_eq!(rejected.len(), 3424 + 41);
        let other = write(&mut respond().0, b"codex-registry/v2").unwrap();
        let mut harness = initiator;
        assert!(harness.finish(&other).is_err(), "an unknown payload");
        let finished = harness.finish(&rejected).unwrap();
        assert!(matches!(finished, Finished::ExecutorRejected));
    }

    #[test]
    fn prologue_matches_golden_bytes() {
        assert_eq!(
            hex(prologue("env-1", "registration-1", "stream-1")),
            "0000000000000020636f6465782d657865632d7365727665722d72656c61792d6e6f6973652f7631\
             0000000000000005656e762d31\
             000000000000000e726567697374726174696f6e2d31\
             000000000000000873747265616d2d31"
        );
    }

    #[test]
    fn handshake_and_records_match_the_test_vector() {
        let harness = StaticKeys::from_seed(&seed(1, 2));
        let executor = StaticKeys::from_seed(&seed(3, 4));
        assert_eq!(
            hex(harness.public.x25519),
            "a4e09292b651c278b9772c569f5fa9bb13d906b46ab68c9df9dc2b4409f8a209"
        );
        assert_eq!(
            sha256(harness.public.mlkem768()),
            "718469495294b6b0b9875f0cd62f2b8fda0ac3852711a87d5c461d7d0d9df7a3"
        );
        assert_eq!(
            hex(executor.public.x25519),
            "5dfedd3b6bd47f6fa28ee15d969d5bb0ea53774d488bdaf9df1c6e0124b3ef22"
        );
        assert_eq!(
            sha256(executor.public.mlkem768()),
            "1bb4f444343d1ca7ccb629670dd2c37e2040fdc6723d2d0f674936b047262d9c"
        );

        let prologue = prologue("env-1", "registration-1", "stream-1");
        let mut initiator = handshake_with(
            &harness,
            Some(&executor.public),
            &prologue,
            &seed(5, 6),
            &[0x11; 32],
        )
        .unwrap();
        assert_eq!(
            initiator.get_name().as_str(),
            "Noise_hybridIK_25519+MLKEM768_AESGCM_SHA256"
        );
        let message = write(&mut initiator, b"auth-token").unwrap();
        assert_eq!(message.len(), 3578);
        assert_eq!(
            sha256(&message),
            "82a18f466667d01ea493d7f9147461df8637c753400376a790c5a972973cde81"
        );

        let mut encapsulation = [0x12; 64];
        encapsulation[32..].fill(0x13);
        let mut responder =
            handshake_with(&executor, None, &prologue, &seed(7, 8), &encapsulation).unwrap();
        assert_eq!(read(&mut responder, &message).unwrap(), b"auth-token");
        let reply = write(&mut responder, &[]).unwrap();
        assert_eq!(reply.len(), 3424);
        assert_eq!(
            sha256(&reply),
            "53d8e05de33e099b1238a3ea038f8556305b17c052592ca5783489d87e693914"
        );
        assert_eq!(read(&mut initiator, &reply).unwrap(), b"");

        let mut here = ChannelKeys::new(initiator, true).unwrap();
        let mut there = ChannelKeys::new(responder, false).unwrap();
        let hash = "390b899384de06828f589e69f0443c585c8a2a55ff5dac769c1519c81484269f";
        assert_eq!(hex(here.hash), hash);
        assert_eq!(hex(there.hash), hash);
        for (from, to, text, sealed) in [
            (
                &mut here.sealer,
                &there.opener,
                "hello",
                "76fa52a67eed13db843cb3f348afed2e115aa358f1",
            ),
            (
                &mut there.sealer,
                &here.opener,
                "world",
                "388612ae673ba97e9cc63b7f50b9c17c5cdb7129ab",
            ),
        ] {
            let mut record = text.as_bytes().to_vec();
            assert_eq!(from.seal(&mut record), Ok(0));
            assert_eq!(hex(&record), sealed);
            assert_eq!(to.open(0, &mut record), Ok(5));
            assert_eq!(&record[..5], text.as_bytes());
        }
    }

    #[test]
    fn handshake_fails_with_other_keys_or_ids() {
        let mut random = entropy(1);
        let [harness, executor, other] = [(); 3].map(|()| StaticKeys::generate(&mut random));
        let (mut initiator, message) =
            Initiator::start(&harness, executor.public_key(), b"p", b"a", &mut random).unwrap();
        for (identity, prologue, message) in [
            (&other, &b"p"[..], message.clone()),
            (&executor, b"q", message.clone()),
            (&executor, b"p", message[..message.len() - 1].to_vec()),
            (&executor, b"p", [&message[..], b"x"].concat()),
            (&executor, b"p", Vec::new()),
            (&executor, b"p", vec![0; 65_536]),
        ] {
            assert!(Responder::read(identity, prologue, &message, &mut random).is_err());
        }
        let (responder, greeting) =
            Responder::read(&executor, b"p", &message, &mut random).unwrap();
        assert_eq!(&greeting.harness, harness.public_key());
        assert_eq!(greeting.payload, b"a");
        let (there, reply) = responder.reply().unwrap();
        // A forged message does not break the handshake with the real executor.
        let mut forged = reply.clone();
        forged[3000] ^= 1;
        assert!(initiator.finish(&forged).is_err());
        let here = opened(initiator.finish(&reply));
        assert_eq!(here.hash, there.hash);
    }

    #[test]
    fn changed_record_is_not_decrypted() {
        let mut random = entropy(2);
        let harness = StaticKeys::generate(&mut random);
        let executor = StaticKeys::generate(&mut random);
        let (mut initiator, message) =
            Initiator::start(&harness, executor.public_key(), b"", b"a", &mut random).unwrap();
        let (responder, _) = Responder::read(&executor, b"", &message, &mut random).unwrap();
        let (there, reply) = responder.reply().unwrap();
        let mut here = opened(initiator.finish(&reply));
        let mut record = b"text".to_vec();
        here.sealer.seal(&mut record).unwrap();
        for bit in 0..record.len() * 8 {
            let mut changed = record.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(there.opener.open(0, &mut changed), Err(DecryptError));
        }
        assert!(
            there.opener.open(1, &mut record.clone()).is_err(),
            "another number"
        );
        assert!(
            here.opener.open(0, &mut record.clone()).is_err(),
            "another direction"
        );
        assert!(there.opener.open(0, &mut [0; 15]).is_err());
        assert_eq!(there.opener.open(0, &mut record), Ok(4));
        let mut empty = Vec::new();
        assert_eq!(here.sealer.seal(&mut empty), Ok(1));
        assert_eq!(
            there.opener.open(1, &mut empty),
            Ok(0),
            "empty records are legal"
        );
    }

    #[test]
    fn identity_is_restored_from_seed_and_not_printed() {
        let identity = StaticKeys::generate(&mut entropy(3));
        let again = StaticKeys::from_seed(identity.seed());
        assert_eq!(identity.public_key(), again.public_key());
        assert!(format!("{identity:?}").len() < 60);
    }
}
