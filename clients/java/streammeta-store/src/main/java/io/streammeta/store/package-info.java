/** Object stores: S3 and local directories, by the same addresses as everywhere in streammeta. */
package io.streammeta.store;
