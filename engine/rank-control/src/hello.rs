//! How two ends of a connection prove to each other that they have the same key, and how what they send afterwards is
//! authenticated.
//!
//! The server sends a challenge; the client answers with a proof over both random numbers and what it says of itself; the server
//! welcomes it with a proof of its own. From then on each message has a tag over its number and its bytes, with a key for each
//! direction that no other connection has. Messages are authenticated, not encrypted: who reads the network reads them.
//!
//! Source: HMAC (RFC 2104) with SHA-256; a key for each direction as in HKDF-Expand (RFC 5869).

use std::fmt;

use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

/// Version of these messages and of those in them.
pub const PROTOCOL: u32 = 1;

/// Most bytes of a message.
pub const MESSAGE_BYTES: usize = 16 << 20;

/// Fewest bytes of a key.
pub const KEY_BYTES: usize = 16;

/// Bytes of a tag.
const TAG_BYTES: usize = 16;

/// A random number that is used once.
pub type Nonce = [u8; 32];

/// The key that all ranks have. Its debug output does not show it.
#[derive(Clone)]
pub struct Key(Vec<u8>);

impl Key {
    /// A key of these bytes, without the blanks and line ends around them.
    ///
    /// # Errors
    /// If there are fewer than [`KEY_BYTES`].
    pub fn new(bytes: &[u8]) -> Result<Self, Refused> {
        let bytes = bytes.trim_ascii();
        match bytes.len() >= KEY_BYTES {
            true => Ok(Self(bytes.to_vec())),
            false => Err(Refused::ShortKey),
        }
    }

    fn mac(&self, purpose: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = Hmac::new_from_slice(&self.0).expect("HMAC takes keys of every length");
        // Lengths before parts: what two of them say cannot be divided in another way.
        for part in [&[purpose.as_bytes()], parts].concat() {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }

    fn proof(&self, purpose: &str, parts: &[&[u8]]) -> [u8; 32] {
        self.mac(purpose, parts).finalize().into_bytes().into()
    }

    fn proves(&self, purpose: &str, parts: &[&[u8]], proof: &[u8; 32]) -> bool {
        self.mac(purpose, parts).verify_slice(proof).is_ok()
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// Why a connection is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refused {
    /// The key is too short.
    ShortKey,
    /// The other end has another key.
    OtherKey,
    /// The other end speaks another version of the protocol.
    OtherProtocol(u32),
    /// A message is not the next one that the other end has sent.
    Changed,
    /// A message is too long.
    TooLong(usize),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ShortKey => write!(f, "the key has fewer than {KEY_BYTES} bytes"),
            Self::OtherKey => f.write_str("the other end has another key"),
            Self::OtherProtocol(version) => {
                write!(
                    f,
                    "the other end speaks version {version} of the protocol, this one {PROTOCOL}"
                )
            }
            Self::Changed => f.write_str("a message was changed, repeated or left out on its way"),
            Self::TooLong(bytes) => {
                write!(f, "a message has {bytes} bytes, more than {MESSAGE_BYTES}")
            }
        }
    }
}

impl std::error::Error for Refused {}

/// The first message, from the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge {
    /// [`PROTOCOL`] of the server.
    pub protocol: u32,
    /// Random.
    pub nonce: Nonce,
}

/// The second message, from the client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Random.
    pub nonce: Nonce,
    /// What the client says of itself.
    pub about: String,
    proof: [u8; 32],
}

/// The third message, from the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    proof: [u8; 32],
}

/// The server's end before it knows the client.
pub struct Server {
    key: Key,
    nonce: Nonce,
}

/// The client's end before it knows the server.
pub struct Client {
    key: Key,
    server: Nonce,
    client: Nonce,
}

impl Server {
    /// The server's end, and the challenge that it sends.
    pub fn new(key: Key, nonce: Nonce) -> (Self, Challenge) {
        (Self { key, nonce }, Challenge { protocol: PROTOCOL, nonce })
    }

    /// Checks the client's answer; returns what it is welcomed with and the messages that follow.
    ///
    /// # Errors
    /// [`Refused::OtherKey`].
    pub fn welcome(self, answer: &Answer) -> Result<(Welcome, Seal, Unseal), Refused> {
        let Self { key, nonce } = self;
        let parts: [&[u8]; 3] = [&nonce, &answer.nonce, answer.about.as_bytes()];
        if !key.proves("answer", &parts, &answer.proof) {
            return Err(Refused::OtherKey);
        }
        let proof = key.proof("welcome", &[&nonce, &answer.nonce]);
        let [of_server, of_client] = session_keys(&key, &nonce, &answer.nonce);
        Ok((Welcome { proof }, Seal::new(of_server), Unseal::new(of_client)))
    }
}

impl Client {
    /// The client's end, and its answer to the server's challenge.
    ///
    /// # Errors
    /// [`Refused::OtherProtocol`].
    pub fn answer(
        key: Key,
        challenge: &Challenge,
        nonce: Nonce,
        about: &str,
    ) -> Result<(Self, Answer), Refused> {
        if challenge.protocol != PROTOCOL {
            return Err(Refused::OtherProtocol(challenge.protocol));
        }
        let proof = key.proof("answer", &[&challenge.nonce, &nonce, about.as_bytes()]);
        let client = Self { key, server: challenge.nonce, client: nonce };
        Ok((client, Answer { nonce, about: about.into(), proof }))
    }

    /// Checks the server's proof; returns the messages that follow.
    ///
    /// # Errors
    /// [`Refused::OtherKey`].
    pub fn welcomed(self, welcome: &Welcome) -> Result<(Seal, Unseal), Refused> {
        let Self { key, server, client } = self;
        if !key.proves("welcome", &[&server, &client], &welcome.proof) {
            return Err(Refused::OtherKey);
        }
        let [of_server, of_client] = session_keys(&key, &server, &client);
        Ok((Seal::new(of_client), Unseal::new(of_server)))
    }
}

/// The keys of both directions: of what the server sends, and of what the client sends.
fn session_keys(key: &Key, server: &Nonce, client: &Nonce) -> [Key; 2] {
    ["from server", "from client"].map(|of| Key(key.proof(of, &[server, client]).to_vec()))
}

/// Makes the bytes of messages: their length (u32, little-endian), themselves, and a tag.
pub struct Seal {
    key: Key,
    number: u64,
}

impl Seal {
    fn new(key: Key) -> Self {
        Self { key, number: 0 }
    }

    /// The bytes of the next message.
    ///
    /// # Errors
    /// [`Refused::TooLong`].
    pub fn seal(&mut self, message: &[u8]) -> Result<Vec<u8>, Refused> {
        if message.len() > MESSAGE_BYTES {
            return Err(Refused::TooLong(message.len()));
        }
        let tag = self.key.proof("message", &[&self.number.to_le_bytes(), message]);
        self.number += 1;
        let length = (message.len() as u32).to_le_bytes();
        Ok([&length[..], message, &tag[..TAG_BYTES]].concat())
    }
}

/// Reads messages from bytes as they come.
pub struct Unseal {
    key: Key,
    number: u64,
    bytes: Vec<u8>,
}

impl Unseal {
    fn new(key: Key) -> Self {
        Self { key, number: 0, bytes: Vec::new() }
    }

    /// Adds bytes that have come. At most one message too many is held.
    pub fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next message, if all of it has come.
    ///
    /// # Errors
    /// [`Refused::TooLong`] and [`Refused::Changed`], after which the connection is of no use.
    pub fn next_message(&mut self) -> Result<Option<Vec<u8>>, Refused> {
        let Some((length, rest)) = self.bytes.split_first_chunk() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > MESSAGE_BYTES {
            return Err(Refused::TooLong(length));
        }
        if rest.len() < length + TAG_BYTES {
            return Ok(None);
        }
        let (message, tag) = (&rest[..length], &rest[length..length + TAG_BYTES]);
        let mac = self.key.mac("message", &[&self.number.to_le_bytes(), message]);
        if mac.verify_truncated_left(tag).is_err() {
            return Err(Refused::Changed);
        }
        self.number += 1;
        let message = message.to_vec();
        self.bytes.drain(..4 + length + TAG_BYTES);
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> Key {
        Key::new(text.as_bytes()).unwrap()
    }

    type Ends = (Seal, Unseal);

    /// Both ends with these keys: what the client and what the server gets.
    fn connect(server: &str, client: &str) -> Result<(Ends, Ends), Refused> {
        let (server, challenge) = Server::new(key(server), [1; 32]);
        let (client, answer) = Client::answer(key(client), &challenge, [2; 32], "rank 1")?;
        let (welcome, seal, unseal) = server.welcome(&answer)?;
        Ok((client.welcomed(&welcome)?, (seal, unseal)))
    }

    const KEY: &str = "a key of sixteen or more";

    #[test]
    fn messages_come_in_both_directions_however_they_are_divided() {
        let ((mut to_server, mut from_server), (mut to_client, mut from_client)) =
            connect(KEY, "  a key of sixteen or more\n").unwrap();
        for message in [&b""[..], b"one", &[7; 100_000]] {
            let sealed = to_server.seal(message).unwrap();
            for byte in &sealed[..sealed.len() - 1] {
                from_client.add(&[*byte]);
            }
            assert_eq!(from_client.next_message(), Ok(None));
            from_client.add(&sealed[sealed.len() - 1..]);
            assert_eq!(from_client.next_message().unwrap().unwrap(), message);
            let both = [to_client.seal(message).unwrap(), to_client.seal(b"last").unwrap()];
            from_server.add(&both.concat());
            assert_eq!(from_server.next_message().unwrap().unwrap(), message);
            assert_eq!(from_server.next_message().unwrap().unwrap(), b"last");
            assert_eq!(from_server.next_message(), Ok(None));
        }
    }

    #[test]
    fn who_has_another_key_is_refused_by_both_ends() {
        let other = "another key of many letters";
        assert_eq!(connect(KEY, other).err(), Some(Refused::OtherKey));
        // A server without the key cannot welcome a client.
        let (server, challenge) = Server::new(key(other), [1; 32]);
        let (client, mut answer) = Client::answer(key(KEY), &challenge, [2; 32], "").unwrap();
        answer.proof = key(other).proof("answer", &[&[1; 32], &[2; 32], b""]);
        let (welcome, ..) = server.welcome(&answer).unwrap();
        assert_eq!(client.welcomed(&welcome).err(), Some(Refused::OtherKey));
        assert_eq!(Key::new(b"short ").err(), Some(Refused::ShortKey));
        assert!(!format!("{:?}", key(KEY)).contains("sixteen"));
    }

    #[test]
    fn an_answer_counts_once_and_as_it_was_given() {
        let (_, challenge) = Server::new(key(KEY), [1; 32]);
        let (_, answer) = Client::answer(key(KEY), &challenge, [2; 32], "rank 1").unwrap();
        // Recorded, and sent to a server that asks again.
        let (again, _) = Server::new(key(KEY), [3; 32]);
        assert_eq!(again.welcome(&answer).err(), Some(Refused::OtherKey));
        let (server, _) = Server::new(key(KEY), [1; 32]);
        let changed = Answer { about: "rank 0".into(), ..answer };
        assert_eq!(server.welcome(&changed).err(), Some(Refused::OtherKey));
        let newer = Challenge { protocol: 2, nonce: [1; 32] };
        let refused = Client::answer(key(KEY), &newer, [2; 32], "").err().unwrap();
        assert_eq!(refused, Refused::OtherProtocol(2));
        assert!(refused.to_string().contains("version 2 of the protocol, this one 1"));
    }

    #[test]
    fn messages_that_are_changed_repeated_left_out_or_sent_back_are_refused() {
        let fresh = || connect(KEY, KEY).unwrap();
        let refused = |bytes: &[u8]| {
            let (_, (_, mut from_client)) = fresh();
            from_client.add(bytes);
            loop {
                match from_client.next_message() {
                    Ok(Some(_)) => {}
                    Ok(None) => return None,
                    Err(refused) => return Some(refused),
                }
            }
        };
        let ((mut seal, _), (mut of_server, _)) = fresh();
        let [first, second] = [b"first", b"other"].map(|text| seal.seal(text).unwrap());
        assert_eq!(refused(&[first.clone(), second.clone()].concat()), None);
        for i in 4..first.len() {
            let mut changed = first.clone();
            changed[i] ^= 1;
            assert_eq!(refused(&changed), Some(Refused::Changed), "byte {i}");
        }
        assert_eq!(refused(&[first.clone(), first].concat()), Some(Refused::Changed));
        assert_eq!(refused(&second), Some(Refused::Changed));
        assert_eq!(refused(&of_server.seal(b"back").unwrap()), Some(Refused::Changed));
        assert_eq!(refused(&[255; 8]), Some(Refused::TooLong(u32::MAX as usize)));
        assert_eq!(
            seal.seal(&vec![0; MESSAGE_BYTES + 1]),
            Err(Refused::TooLong(MESSAGE_BYTES + 1))
        );
    }
}
