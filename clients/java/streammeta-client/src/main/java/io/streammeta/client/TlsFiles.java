package io.streammeta.client;

import java.nio.file.Path;

/**
 * Files of a TLS client, in PEM. They may be replaced at any time.
 *
 * @param ca the certificates of the authorities that sign the controllers' certificates
 * @param certificate the client's certificate, and those between it and its authority
 * @param key the private key of the certificate, as PKCS#8 without a password
 */
public record TlsFiles(Path ca, Path certificate, Path key) {}
